// What a finished schedule says: busy and exposed seconds, and the chain of ops that decided the step's length.
#pragma once

#include <span>
#include <vector>

#include "simulator/graph.h"
#include "simulator/machine.h"
#include "simulator/memory.h"

namespace memtune {

Timeline report(std::span<const Step> steps, const Graph& graph, bool host_computes, std::vector<Memory>& memories);

}  // namespace memtune
