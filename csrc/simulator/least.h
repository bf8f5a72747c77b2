// The coarse level of time: what one optimizer step takes at the least, in one pass over its ops.
#pragma once

#include <span>
#include <vector>

#include "simulator/machine.h"
#include "simulator/step.h"

namespace memtune {

// By class when its last op, or its host, has finished at the earliest: the longest way by the rules of `machine.h`, without rule 5.
// Each stream is taken to have its resource for itself but for what ranks of its own class take of a PCIe root, so no time is later
// than what `schedule` says. Of the rules it asks for `accumulate`, `host_computes` and `shares_cores`: work of shared cores that is
// issued before compute waits for something still adds up. More than a few repetitions are not gone through one by one: each stream
// goes on as in those before. Where classes would wait for each other forever, one of them does not wait.
// Throws std::invalid_argument where there is not one place for each class.
std::vector<double> least_s(std::span<const Step> steps, std::span<const Place> places, const Rules& rules);

}  // namespace memtune
