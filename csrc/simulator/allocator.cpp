#include "simulator/allocator.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "rows.h"
#include "simulator/caching_allocator.h"
#include "simulator/vmm_pool.h"

namespace memtune {
namespace {

constexpr std::int32_t kNone = -1, kRefused = -2, kEmpty = -3;  // what a storage has instead of a block
constexpr std::int64_t kMaxStreams = 1 << 16;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 45;       // below what an expandable segment has addresses for
constexpr std::int64_t kMaxAddress = std::int64_t{1} << 60;
constexpr std::int64_t kAsyncPageBytes = 32 << 20;

[[noreturn]] void refuse(std::size_t event, const std::string& why) {
  throw std::invalid_argument("event " + std::to_string(event) + ": " + why);
}

// The driver's pool behind cudaMallocAsync: a number of live bytes. Frees wait for other streams as they do elsewhere.
class AsyncPool {
 public:
  explicit AsyncPool(const AllocatorConfig& config) : limit_(std::min(config.capacity_bytes, config.allowed_bytes)) {}

  std::int32_t allocate(std::int64_t bytes, std::int32_t, std::int64_t op) {
    finish_until(op);
    const std::int64_t size = (bytes + kMinBlockBytes - 1) / kMinBlockBytes * kMinBlockBytes;
    if (live_ + size > limit_) {
      ++retries_;
      finish_until(kUnlimited);
      if (live_ + size > limit_) return -1;
    }
    live_ += size;
    if (live_ > reserved_) grow();
    return sizes_.add(size);
  }

  void free(std::int32_t block, std::int64_t op, std::int64_t ready_op) {
    pending_.free(block, op, ready_op, [&](std::int32_t ready) { release(ready); });
  }

  void release_cached() {
    finish_until(kUnlimited);
    const std::int64_t needed = std::min(pages(live_), limit_);
    // cudaMemPoolTrimTo is one call, whatever it gives back.
    device_frees_ += needed < reserved_;
    reserved_ = needed;
  }

  PlacedBlock block(std::int32_t index) const { return {-1, sizes_[index]}; }  // the driver does not say where it is
  std::int64_t reserved_bytes() const { return reserved_; }
  std::int64_t peak_reserved_bytes() const { return peak_reserved_; }
  void restart_peak() { peak_reserved_ = reserved_; }
  std::int64_t device_allocs() const { return device_allocs_; }
  std::int64_t device_frees() const { return device_frees_; }
  std::int64_t retries() const { return retries_; }
  std::int64_t largest_free_bytes() const { return reserved_ - live_; }

 private:
  static std::int64_t pages(std::int64_t bytes) { return (bytes + kAsyncPageBytes - 1) / kAsyncPageBytes * kAsyncPageBytes; }

  // The last page is a smaller one where a whole one has no place left.
  void grow() {
    reserved_ = std::min(pages(live_), limit_);
    peak_reserved_ = std::max(peak_reserved_, reserved_);
    ++device_allocs_;
  }

  void release(std::int32_t block) {
    live_ -= sizes_[block];
    sizes_.give_up(block);
  }

  void finish_until(std::int64_t op) { pending_.finish_until(op, [&](std::int32_t block) { release(block); }); }

  std::int64_t limit_, live_ = 0, reserved_ = 0, peak_reserved_ = 0, device_allocs_ = 0, device_frees_ = 0, retries_ = 0;
  Rows<std::int64_t> sizes_;
  PendingFrees pending_;
};

// Runs the events through `allocator` and watches the counters.
template <typename Allocator>
class Run {
 public:
  Run(const AllocatorEvents& events, const AllocatorConfig& config, bool timeline)
      : events_(events), timeline_(timeline), allocator_(config) {
    std::int32_t storages = 0;
    for (const std::int32_t storage : events.storage) storages = std::max(storages, storage + 1);
    block_of_.assign(storages, kNone);
    if constexpr (requires { allocator_.adopt(events.held); }) held_ = allocator_.adopt(events.held);
    if (!timeline) return;
    for (auto* column : {&out_.reserved_bytes, &out_.allocated_bytes, &out_.address}) column->reserve(events.n());
  }

  AllocatorReplay all() {
    for (std::size_t s = 0; s < events_.step.size(); ++s) {
      const bool last = s + 1 == events_.step.size();
      step(events_.step[s], last ? static_cast<std::int64_t>(events_.n()) : events_.step[s + 1]);
    }
    out_.end_reserved_bytes = allocator_.reserved_bytes();
    out_.end_allocated_bytes = allocated_;
    out_.device_allocs = allocator_.device_allocs();
    out_.device_frees = allocator_.device_frees();
    out_.retries = allocator_.retries();
    if constexpr (kSteps) allocator_.report(out_);
    return std::move(out_);
  }

 private:
  static constexpr bool kSteps = requires(Allocator allocator) { allocator.end_step(); };

  void step(std::int64_t first, std::int64_t end) {
    const std::int64_t calls = allocator_.device_allocs() + allocator_.device_frees();
    allocator_.restart_peak();
    step_allocated_ = allocated_;
    for (std::int64_t event = first; event < end; ++event) {
      const std::int64_t address = one(static_cast<std::size_t>(event));
      if (allocator_.peak_reserved_bytes() > out_.peak_reserved_bytes) {
        out_.peak_reserved_bytes = allocator_.peak_reserved_bytes();
        out_.peak_event = event;
        out_.allocated_at_peak_bytes = allocated_;
      }
      if (!timeline_) continue;
      out_.reserved_bytes.push_back(allocator_.reserved_bytes());
      out_.allocated_bytes.push_back(allocated_);
      out_.address.push_back(address);
    }
    if constexpr (kSteps) allocator_.end_step();
    out_.step_device_calls.push_back(allocator_.device_allocs() + allocator_.device_frees() - calls);
    out_.step_reserved_bytes.push_back(allocator_.peak_reserved_bytes());
    out_.step_allocated_bytes.push_back(step_allocated_);
    out_.peak_allocated_bytes = std::max(out_.peak_allocated_bytes, step_allocated_);
  }

  // Returns the address of an allocation, -1 for what is none.
  std::int64_t one(std::size_t event) {
    if (events_.action[event] == kEmptyCache) {
      allocator_.release_cached();
      return -1;
    }
    std::int32_t& block = block_of_[events_.storage[event]];
    if (events_.action[event] == kFree) {
      free(event, block);
      return -1;
    }
    if (block != kNone) refuse(event, "storage " + std::to_string(events_.storage[event]) + " is allocated already");
    return allocate(event, block);
  }

  std::int64_t allocate(std::size_t event, std::int32_t& block) {
    const std::int64_t bytes = events_.bytes[event];
    if (bytes == 0) {
      block = kEmpty;
      return -1;
    }
    const std::int32_t found =
        // The first events are the storages of the held memory, which is placed already.
        event < held_.size() ? held_[event] : allocator_.allocate(bytes, events_.stream[event], events_.op[event]);
    if (found < 0) {
      block = kRefused;
      if (out_.ooms++ == 0) {
        out_.first_oom = {static_cast<std::int64_t>(event), bytes, allocated_, allocator_.reserved_bytes(),
                          allocator_.largest_free_bytes()};
      }
      return -1;
    }
    block = found;
    allocated_ += allocator_.block(found).bytes;
    step_allocated_ = std::max(step_allocated_, allocated_);
    return allocator_.block(found).address;
  }

  void free(std::size_t event, std::int32_t& block) {
    if (block == kNone) refuse(event, "storage " + std::to_string(events_.storage[event]) + " is freed but not allocated");
    if (block >= 0) {
      allocated_ -= allocator_.block(block).bytes;
      allocator_.free(block, events_.op[event], events_.ready_op[event]);
    }
    block = kNone;
  }

  const AllocatorEvents& events_;
  const bool timeline_;
  Allocator allocator_;
  std::vector<std::int32_t> block_of_, held_;
  std::int64_t allocated_ = 0, step_allocated_ = 0;
  AllocatorReplay out_;
};

}  // namespace

void AllocatorEvents::check() const {
  const auto same = [&](const char* column, std::size_t length) {
    if (length != n()) {
      throw std::invalid_argument(std::string(column) + " has " + std::to_string(length) + " rows instead of " +
                                  std::to_string(n()));
    }
  };
  same("storage", storage.size());
  same("bytes", bytes.size());
  same("stream", stream.size());
  same("op", op.size());
  same("ready_op", ready_op.size());
  for (std::size_t event = 0; event < n(); ++event) {
    if (action[event] >= kActions) refuse(event, "there is no action " + std::to_string(action[event]));
    if (storage[event] < 0) refuse(event, "storage is negative");
    if (bytes[event] < 0 || bytes[event] > kMaxBytes) refuse(event, "bytes must lie in [0, 2^45]");
    if (stream[event] < 0 || stream[event] >= kMaxStreams) refuse(event, "stream must lie in [0, 65536)");
    if (event > 0 && op[event] < op[event - 1]) refuse(event, "op falls");
  }
  for (std::size_t s = 0; s < step.size(); ++s) {
    const std::int64_t before = s == 0 ? 0 : step[s - 1];
    if (step[s] < before || step[s] > static_cast<std::int64_t>(n()) || (s == 0 && step[s] != 0)) {
      throw std::invalid_argument("step must rise from 0 to at most the number of events");
    }
  }
  if (step.empty() && n() > 0) throw std::invalid_argument("step must say where the first step begins");
  held.check(n());
  for (std::size_t event = 0; event < held.block_address.size(); ++event) {
    if (action[event] != kAlloc || bytes[event] == 0) refuse(event, "it must be an allocation, of a block that is held");
  }
}

void HeldMemory::check(std::size_t events) const {
  const std::size_t segments = segment_address.size(), blocks = block_address.size();
  const auto fail = [](const char* what, std::size_t row) {
    throw std::invalid_argument(std::string("held ") + what + " " + std::to_string(row) + ": it overlaps another or lies outside");
  };
  if (segment_bytes.size() != segments || segment_stream.size() != segments || segment_small.size() != segments ||
      block_bytes.size() != blocks || blocks > events) {
    throw std::invalid_argument("columns of held memory must have the same length");
  }
  for (std::size_t s = 0; s < segments; ++s) {
    const std::int64_t before = s == 0 ? 0 : segment_address[s - 1] + segment_bytes[s - 1];
    if (segment_address[s] < before || segment_bytes[s] <= 0 || segment_bytes[s] > kMaxBytes || segment_address[s] > kMaxAddress ||
        segment_stream[s] < 0 || segment_stream[s] >= kMaxStreams) {
      fail("segment", s);
    }
  }
  for (std::size_t b = 0, s = 0; b < blocks; ++b) {
    const std::int64_t before = b == 0 ? 0 : block_address[b - 1] + block_bytes[b - 1];
    while (s < segments && segment_address[s] + segment_bytes[s] <= block_address[b]) ++s;
    if (block_address[b] < before || block_bytes[b] <= 0 || s == segments || block_address[b] < segment_address[s] ||
        block_bytes[b] > segment_address[s] + segment_bytes[s] - block_address[b]) {
      fail("block", b);
    }
  }
}

AllocatorReplay replay(const AllocatorEvents& events, const AllocatorConfig& config, bool timeline) {
  events.check();
  if (config.arena) return Run<VmmPool>(events, config, timeline).all();
  return config.async ? Run<AsyncPool>(events, config, timeline).all() : Run<CachingAllocator>(events, config, timeline).all();
}

}  // namespace memtune
