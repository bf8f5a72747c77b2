// One device's memory under this folder's rules: small requests from expandable arenas, large ones stitched, planned ones by plan.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmm/arena.h"
#include "vmm/lifetimes.h"
#include "vmm/memory.h"
#include "vmm/planned.h"
#include "vmm/stitcher.h"

namespace memtune::vmm {

struct AllocatorOptions {
  StitchOptions stitch;
  std::int64_t arena_below_bytes = 2 << 20;  // requests below this come from the arena of their stream
  std::int64_t arena_range_bytes = std::int64_t{1} << 38;
  bool planned = false;
  PlanOptions plan;
  bool pools = false;                        // all requests come from arenas, one for each lifetime and stream
  std::int64_t transient_within = 64;        // requests and frees
  std::int64_t limit_bytes = std::int64_t{1} << 62;  // of memory from the driver
};

struct Statistics {
  std::int64_t allocated_bytes = 0, peak_allocated_bytes = 0;  // in use, in multiples of 512
  std::int64_t reserved_bytes = 0, peak_reserved_bytes = 0;    // from the driver
  std::int64_t driver_calls = 0, requests = 0, failures = 0, stitched_bytes = 0;
  std::int64_t states[5] = {};
  std::int64_t plan_bytes = 0, plan_bound_bytes = 0, plan_requests = 0, plan_served = 0, deviations = 0, plans = 0;
  std::string first_deviation;
};

// Not thread-safe. A block belongs to the stream that requested it; the caller of `free` ensures that no other stream still uses it.
class Allocator {
 public:
  Allocator(std::unique_ptr<Driver> driver, const AllocatorOptions& options);

  Address allocate(std::int64_t bytes, std::int32_t stream);  // 0: memory has run out
  bool free(Address address);                                 // false: nothing in use begins there
  // The block is allocated no more, as torch counts; `free` follows once no other stream works on it. False as there.
  bool free_later(Address address);
  std::int64_t bytes_at(Address address) const;               // of the block in use that begins there, -1: none
  std::int32_t stream_at(Address address) const;              // of the same, -1: none
  void begin_update();                                        // where the optimizer begins
  void end_step();                                            // where a training step ends
  void release_unused();
  void restart_peaks();
  void limit(std::int64_t bytes) { memory_.limit(bytes); }
  Statistics statistics() const;
  std::vector<Region> regions() const;  // all memory from the driver, and what lies in it
  std::int64_t reserved_bytes() const { return memory_.bytes(); }
  std::int64_t peak_reserved_bytes() const { return memory_.peak_bytes(); }
  std::int64_t allocated_bytes() const { return allocated_; }
  bool is_empty() const { return blocks_.empty(); }
  std::int64_t driver_calls() const { return memory_.calls(); }

 private:
  enum class Owner : std::uint8_t { kPlanned, kArena, kStitcher };
  struct Block {
    std::int64_t bytes;
    std::int32_t stream;
    Owner owner;
    Pool pool;
    bool is_freed = false;  // by `free_later`
  };

  Address serve(Block& block);
  Address serve_last(const Block& block);
  Arena& arena(const Block& block);
  void saw_allocation(Address address, const Block& block);
  void saw_free(Address address);
  const Steps& steps() const { return options_.pools ? lifetimes_.steps() : planned_.steps(); }

  AllocatorOptions options_;
  Memory memory_;
  std::map<std::pair<std::int32_t, Pool>, Arena> arenas_;
  Stitcher stitcher_;
  Planned planned_;
  Lifetimes lifetimes_;
  std::unordered_map<Address, Block> blocks_;
  bool changed_ = false;  // at the last end of a step: where requests are served from
  enum class State : std::uint8_t { kNone, kBeingMade, kMade } state_ = State::kNone;  // the optimizer's
  std::int64_t allocated_ = 0, peak_allocated_ = 0, requests_ = 0, failures_ = 0;
};

}  // namespace memtune::vmm
