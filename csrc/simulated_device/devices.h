// Simulated devices: streams, events, queued work, and memory; torch is not known here (backend.cpp, kernels.cpp).
//
// Rules:
//  1. Kernels and copies are queued. The host runs one when it has waited for it, or needs its result, with all that is ordered
//     before it and nothing else: so each stream is as late as events allow, and an op that no wait orders finds stale bytes.
//  2. The place of an op in time is its clock (order.h): a use of bytes that no chain of events orders after an earlier use is a
//     race, and is reported whatever runs first.
//  3. Device memory has two mappings. Tensors hold addresses of the first, whose pages forbid reads and writes; kernels use the second.
//  4. New device memory is filled with 0xFF, freed memory after its last use: NaN in every floating type, -1 in integers.
//  5. A block that other streams use may be freed if their use is ordered before the next op of its own stream, or if it was
//     recorded on them (record_stream); else the next allocation on its stream reports them.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "simulated_device/driver_memory.h"
#include "simulated_device/order.h"
#include "simulator/caching_allocator.h"

namespace memtune::sim {

inline constexpr int kStreams = 33;                            // per device: the default one and a pool of 32, as CUDA's
inline constexpr std::int64_t kAddressBytes = std::int64_t{1} << 40;  // per device; only touched pages take memory

inline constexpr std::size_t kQueuedOps = 1024;  // of all streams together; with more, the first ones run, as with CUDA's queues

// An allocator instead of the device's own one, by the functions of CUDA's pluggable allocators; its streams are `Devices::handle`.
// It gets memory from cuda_driver.cpp.
struct OtherAllocator {
  void* (*allocate)(std::size_t bytes, int device, void* stream) = nullptr;
  void (*free)(void* data, std::size_t bytes, int device, void* stream) = nullptr;
  void (*record_stream)(void* data, void* stream) = nullptr;
  void (*memory_fraction)(double fraction, int device) = nullptr;
  void (*empty_cache)() = nullptr;
};

enum class Pace { kImmediate, kRandom, kDeferred };  // of kernels and copies: at once, at some later op, as late as events allow

struct Settings {
  int devices = 2;
  std::int64_t capacity_bytes = std::int64_t{4} << 30;  // of each device
  Pace pace = Pace::kDeferred;
  std::uint64_t seed = 0;
  bool raises = true;  // races are errors; else they are only recorded
  AllocatorConfig allocator = {};
  OtherAllocator other = {};
};

struct Access {
  Range range;
  bool writes;
};

struct Counter {
  std::int64_t now = 0, peak = 0, added = 0, removed = 0;
  void add(std::int64_t n) {
    now += n;
    added += n;
    if (now > peak) peak = now;
  }
  void remove(std::int64_t n) {
    now -= n;
    removed += n;
  }
};

struct MemoryStats {
  Counter allocated_bytes[3], requested_bytes[3], allocations[3];  // of all, of small and of large blocks
  Counter reserved_bytes;
  std::int64_t retries = 0, ooms = 0, device_allocs = 0, device_frees = 0;
};

struct OutOfMemory : std::exception {
  std::int64_t requested_bytes, capacity_bytes, allocated_bytes, reserved_bytes;
  int device;
  const char* what() const noexcept override { return "out of memory"; }
};

struct Block {
  int device, stream;
  std::int32_t index;  // in the caching allocator; -1: of the other allocator
  std::int64_t requested_bytes, bytes;
  Range range;
  std::vector<int> recorded;  // timelines that use it too
  bool small;
};

struct Event {
  bool recorded = false;
  Use use;  // the last op before it
  Clock clock;
  std::shared_ptr<double> at_ms = std::make_shared<double>(0);  // when the ops before it had run
  int questions = 0;  // queries since it was recorded
};

class Devices {
 public:
  static Devices& get();

  // Throws std::logic_error once a device has been used.
  void configure(const Settings& settings);
  const Settings& settings() const { return settings_; }
  int count() const { return settings_.devices; }

  // From here on the process counts as one that has started a driver: its forks cannot use the devices.
  void touch();
  bool is_forked() const { return forked_; }
  // From now on each use of a device calls `raise`, which throws: the devices are lost, their memory stays as it is.
  void lose(std::function<void()> raise);

  static int timeline(int device, std::int64_t stream) { return 1 + device * kStreams + static_cast<int>(stream); }
  std::int64_t next_stream(int device);
  // The handle of a stream for another allocator: as with CUDA, that of the default stream of each device is null.
  static void* handle(int timeline) {
    return (timeline - 1) % kStreams == 0 ? nullptr : reinterpret_cast<void*>(static_cast<std::uintptr_t>(timeline));
  }
  static int timeline_of(void* handle) { return static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)); }

  const std::string* name(const std::string& text);

  // Runs an op, and returns what the host did wrong since it was issued, "" if nothing.
  using Run = std::function<std::string()>;
  // Queues an op. `pinned`: the host memory that it uses.
  void issue(int timeline, const std::string* op, const std::vector<Access>& accesses, Run run, Range pinned = {0, 0});
  // Issues an op that the caller runs at once, when this returns. `host_waits`: the host waits until it is over.
  void issue_now(int timeline, const std::string* op, const std::vector<Access>& accesses, bool host_waits);
  // Runs all that is queued; the order of later ops is not changed.
  void run_all();
  // Whether a queued op uses this pinned memory.
  bool is_queued(Range pinned);

  void record(Event& event, int timeline);
  void wait(int timeline, const Event& event);
  void wait_timeline(int timeline, int other);
  void host_waits(const Event& event);
  void host_waits_stream(int timeline);
  void host_waits_device(int device);
  bool query(Event& event);
  bool query_stream(int timeline);

  Block* allocate(int device, std::int64_t stream, std::int64_t bytes);
  void free(Block* block);
  void record_stream(Block* block, int timeline);
  void empty_cache();
  MemoryStats stats(int device);
  void reset_peaks(int device);
  std::int64_t free_bytes(int device);
  // The bytes that the allocator of `device` may hold from now on.
  void limit(int device, std::int64_t bytes);

  // The driver's memory, for the other allocator.
  std::uintptr_t reserve(int device, std::size_t bytes);
  std::uintptr_t create(int device);
  void release(int device, std::uintptr_t chunk);
  bool map(std::uintptr_t address, std::uintptr_t chunk);
  bool unmap(std::uintptr_t address, std::size_t bytes);
  // The next use of a device raises `error`.
  void raise_later(const std::string& error);

  void* allocate_pinned(std::int64_t bytes);
  void free_pinned(void* data);
  bool is_pinned(const void* data);
  // Of blocks of powers of two, as torch's allocator of pinned memory makes them.
  Counter pinned_bytes();
  void reset_pinned_peak();

  // Where kernels find the memory at `guarded`, an address that tensors hold.
  void* open(const void* guarded) const;
  // The device whose memory `data` is, -1: none.
  int device_of(const void* data) const;

  std::vector<std::string> take_races();

 private:
  struct Task {
    std::vector<Use> after;  // runs when these are covered: the op itself, or those that a fill follows
    Run run;
    Range pinned;
    Clock clock;  // of an op
  };
  struct HeldBlock {
    Block* block;
    std::vector<Use> uses;  // that must be over
  };
  struct Suspect {
    Range range;
    std::vector<Use> uses;
  };
  struct Pinned {
    std::int64_t bytes;
    bool freed = false;  // kept for the copies that use it
  };
  struct Device {
    explicit Device(const AllocatorConfig& config) : allocator(config) {}
    CachingAllocator allocator;
    MemoryStats stats;
    std::vector<HeldBlock> held;
    std::int64_t streams = 0;  // handed out
    std::int64_t touched_bytes = 0;  // memory from here on has never been handed out
  };
  // A use of the devices; holds the lock.
  class Section {
   public:
    explicit Section(Devices& devices) : lock_(devices.mutex_) { devices.start(); }

   private:
    std::lock_guard<std::recursive_mutex> lock_;
  };

  void start();
  void begin(int timeline, const std::string* op, const std::vector<Access>& accesses);
  template <typename Due>
  void run_tasks(Due due);
  void run_until(const Clock& clock);
  void fill(Range range);
  void host_waits_clock(const Clock& clock);
  void report(const std::string& text, bool may_raise);
  void raise_unreported();
  Block* allocate_from_other(int device, std::int64_t stream, std::int64_t bytes);
  void free_to_other(Block* block);
  std::vector<Range> behind(Range range) const { return driver_ ? driver_->behind(range) : std::vector<Range>{range}; }
  std::vector<Use> uncovered(Range range, const Clock& clock) const;
  std::string describe(const Race& race) const;
  std::string place(int timeline) const;
  void release(Block* block);
  void release_held(Device& device);
  void suspect(const Block& block, const Clock& clock);
  void check_suspects(int timeline);
  void release_pinned();

  std::recursive_mutex mutex_;
  bool started_ = false;
  bool touched_ = false;
  bool forked_ = false;
  std::function<void()> lost_;
  Settings settings_;
  std::mt19937_64 random_;
  std::unordered_set<std::string> names_;
  std::unique_ptr<Order> order_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::deque<Task> tasks_;  // in the order in which they were issued
  std::vector<std::vector<Suspect>> suspects_;  // by timeline
  std::vector<std::pair<Tick, int>> questions_;  // by timeline: queries since its last op
  std::map<std::uintptr_t, Pinned> pinned_;  // by address
  Counter pinned_bytes_;
  std::vector<std::string> races_;
  std::string unreported_;
  std::unique_ptr<DriverMemory> driver_;  // if another allocator serves
  char* guarded_ = nullptr;
  char* open_ = nullptr;
};

}  // namespace memtune::sim
