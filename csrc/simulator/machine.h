// The events level: when every op of one optimizer step starts and finishes.
#pragma once

#include <array>
#include <cstdint>

#include "simulator/step.h"

namespace memtune {

struct Timeline {
  double step_s = 0;                            // when the last op, or the host, has finished
  std::array<double, kResources> busy_s{};      // by resource, all repetitions
  std::array<double, kResources> exposed_s{};   // of that, not hidden behind compute
};

// Forward, recompute and backward ops run `accumulate` times, the prologue in the first repetition, boundary and optimizer in
// the last, all in program order. An op starts when
//   - the host has come to it and, where `op_issue_s` is not 0, has spent that long on it;
//   - its resource has finished the ops before it;
//   - what it reads has been written, and what it writes is read by nobody any more.
// Where `host_computes`, the host is busy while a compute op runs; else it runs ahead of the device.
Timeline schedule(const Step& step, std::int64_t accumulate, bool host_computes);

}  // namespace memtune
