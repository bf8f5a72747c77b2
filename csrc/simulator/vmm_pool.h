// memtune's own allocator (csrc/vmm) over books instead of memory, as the replay sees it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rows.h"
#include "simulator/allocator.h"
#include "simulator/caching_allocator.h"

namespace memtune {

class VmmPool {
 public:
  explicit VmmPool(const AllocatorConfig& config)
      : allocator_(vmm::page_table(std::min(config.capacity_bytes, config.allowed_bytes)), *config.arena) {}

  std::int32_t allocate(std::int64_t bytes, std::int32_t stream, std::int64_t op) {
    pending_.finish_until(op, [&](std::int32_t block) { release(block); });
    const vmm::Address address = allocator_.allocate(bytes, stream);
    if (address == 0) return -1;
    return blocks_.add({static_cast<std::int64_t>(address), allocator_.bytes_at(address)});
  }

  void free(std::int32_t block, std::int64_t op, std::int64_t ready_op) {
    pending_.free(block, op, ready_op, [&](std::int32_t ready) { release(ready); });
  }

  PlacedBlock block(std::int32_t index) const { return blocks_[index]; }
  void end_step() { allocator_.end_step(); }
  void release_cached() {
    pending_.finish_until(kUnlimited, [&](std::int32_t block) { release(block); });
    allocator_.release_unused();
  }
  std::int64_t reserved_bytes() const { return allocator_.reserved_bytes(); }
  std::int64_t peak_reserved_bytes() const { return allocator_.peak_reserved_bytes(); }
  void restart_peak() { allocator_.restart_peaks(); }
  std::int64_t device_allocs() const { return allocator_.driver_calls(); }
  std::int64_t device_frees() const { return 0; }  // all calls are counted above
  std::int64_t retries() const { return 0; }
  std::int64_t largest_free_bytes() const { return allocator_.reserved_bytes() - allocator_.allocated_bytes(); }

  void report(AllocatorReplay& replay) const {
    const vmm::Statistics found = allocator_.statistics();
    replay.plan_bytes = found.plan_bytes;
    replay.plan_bound_bytes = found.plan_bound_bytes;
    replay.deviations = found.deviations;
  }

 private:
  void release(std::int32_t block) {
    allocator_.free(static_cast<vmm::Address>(blocks_[block].address));
    blocks_.give_up(block);
  }

  vmm::Allocator allocator_;
  Rows<PlacedBlock> blocks_;
  PendingFrees pending_;
};

}  // namespace memtune
