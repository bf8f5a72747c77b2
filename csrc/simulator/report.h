// Results of a finished schedule: busy and exposed seconds, and the critical path.
#pragma once

#include <span>
#include <vector>

#include "simulator/graph.h"
#include "simulator/machine.h"
#include "simulator/memory.h"

namespace memtune {

Timeline report(std::span<const Step> steps, const Graph& graph, bool host_computes, std::vector<Memory>& memories);

}  // namespace memtune
