// The coarse level: live bytes per tier over the ops of one step, and how long each resource is needed.
#pragma once

#include <array>
#include <cstdint>

#include "simulator/step.h"

namespace memtune {

// A device allocator hands out multiples of `rounding_bytes`, from one pool for requests up to `small_bytes` and from another
// for larger ones. Rounding 1 is an exact ledger.
struct AllocatorRules {
  std::int64_t rounding_bytes = 1;
  std::int64_t small_bytes = 0;

  std::int64_t rounded(std::int64_t bytes) const { return (bytes + rounding_bytes - 1) / rounding_bytes * rounding_bytes; }
};

// Peaks of a step.
struct Footprint {
  std::array<std::int64_t, kTiers> peak_bytes{};
  std::array<std::int32_t, kTiers> peak_op{-1, -1, -1};   // the first op at the peak, -1 for a step without ops
  std::array<std::int64_t, 2> pool_peak_bytes{};          // device: small requests, large requests
  std::array<std::int64_t, kKinds + 1> bytes_by_kind{};   // device, at its peak; the last one: what autograd saved
};

struct Live : Footprint {
  std::array<std::array<double, kPhases>, kResources> busy_s{};  // sums over one pass of the step
};

// A storage is counted from its producer to the last of: its last use, `held_until`, its last `save_until`.
Live live(const Step& step, const AllocatorRules& rules);

}  // namespace memtune
