// PyTorch's CUDA caching allocator, replayed over a stream of allocations and frees.
//
// The rules are those of torch 2.13 (c10/cuda/CUDACachingAllocator.cpp, c10/core/AllocatorConfig.h), for one device, without
// CUDA graphs' private pools. Two things are a model. Addresses: a new segment lies above all earlier ones, while the driver
// may use an address again; this decides only between free blocks of equal size. And cudaMallocAsync, whose pool belongs to
// the driver: live bytes in pages of 32 MiB, nothing lost to fragmentation, kept until memory runs out.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "vmm/allocator.h"

namespace memtune {

inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
inline constexpr std::size_t kRoundupIntervals = 16;

struct AllocatorConfig {
  std::int64_t max_split_bytes = kUnlimited;             // from here on blocks are not split, nor given to smaller requests
  std::int64_t max_non_split_rounding_bytes = 20 << 20;  // how much larger than the request such a block may be
  std::int64_t large_segment_bytes = 20 << 20;           // segment, or page, for requests above 1 MiB
  std::array<std::int64_t, kRoundupIntervals> roundup_divisions{};  // by power of two from 1 MiB on; 0 and 1: multiples of 512
  double garbage_collection_threshold = 0;               // share of allowed_bytes above which old blocks are given back
  bool expandable_segments = false;
  bool async = false;                                    // cudaMallocAsync
  std::optional<vmm::AllocatorOptions> arena;            // memtune's own, in place of torch's
  std::int64_t capacity_bytes = kUnlimited;              // what the driver has to give
  std::int64_t allowed_bytes = kUnlimited;               // the limit of the process (per_process_memory_fraction)
};

// Where a live storage is, and how many bytes its allocator counts for it.
struct PlacedBlock {
  std::int64_t address, bytes;
};

// Memory that the allocator holds before the first event: segments in order of address, and in them the blocks of the first rows,
// which must be allocations. The rest of them is free. Only torch's own allocator can start so.
struct HeldMemory {
  std::span<const std::int64_t> segment_address, segment_bytes;  // of expandable segments: contiguous mapped stretches
  std::span<const std::int32_t> segment_stream;
  std::span<const std::uint8_t> segment_small;   // whether the small pool owns it
  std::span<const std::int64_t> block_address, block_bytes;  // rising, each within a segment

  // Throws std::invalid_argument naming the row that overlaps another or lies outside.
  void check(std::size_t events) const;
};

enum Action : std::uint8_t { kAlloc, kFree, kEmptyCache, kActions };

// Events of a program, one per row; `op` is their time, ascending.
struct AllocatorEvents {
  std::span<const std::uint8_t> action;
  std::span<const std::int32_t> storage;   // a name from 0 on, of one live storage at a time
  std::span<const std::int64_t> bytes;     // asked for; 0 allocates nothing
  std::span<const std::int32_t> stream;    // that an allocation is made on, from 0 on
  std::span<const std::int64_t> op;        // not falling
  std::span<const std::int64_t> ready_op;  // of a free: the op at which all other streams have finished with the storage
  std::span<const std::int64_t> step;      // first event of each step; the first is 0
  HeldMemory held = {};                    // empty: the allocator starts empty

  std::size_t n() const { return action.size(); }

  // Throws std::invalid_argument naming the column that has another length or points outside.
  void check() const;
};

// The first allocation that could not be served.
struct OutOfMemory {
  std::int64_t event = -1;
  std::int64_t requested_bytes = 0, allocated_bytes = 0, reserved_bytes = 0, largest_free_bytes = 0;
};

struct AllocatorReplay {
  std::int64_t peak_reserved_bytes = 0, peak_allocated_bytes = 0;
  std::int64_t peak_event = -1;               // at which reserved bytes first were at their peak
  std::int64_t allocated_at_peak_bytes = 0;   // right after it
  std::int64_t end_reserved_bytes = 0, end_allocated_bytes = 0;
  std::int64_t device_allocs = 0, device_frees = 0;  // calls of cudaMalloc and cudaFree, or mapping and unmapping
  std::int64_t retries = 0, ooms = 0;
  OutOfMemory first_oom;
  std::vector<std::int64_t> step_reserved_bytes, step_allocated_bytes;  // peaks by step
  std::vector<std::int64_t> step_device_calls;                          // of the driver, by step
  std::vector<std::int64_t> reserved_bytes, allocated_bytes;            // after each event, where asked for
  std::vector<std::int64_t> address;                                    // of each allocation, -1 for all other events
  std::int64_t plan_bytes = 0, plan_bound_bytes = 0, deviations = 0;    // of a planned arena: its height, the most live bytes
};

// Runs `events` through an allocator that starts with `events.held`. After an allocation that cannot be served the program goes on as if it
// had caught the error: the storage does not exist, and its free does nothing. `timeline` fills the columns by event.
AllocatorReplay replay(const AllocatorEvents& events, const AllocatorConfig& config, bool timeline);

}  // namespace memtune
