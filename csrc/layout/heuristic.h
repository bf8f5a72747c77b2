// The heuristic tier: what an allocator would do, first fit in several orders, then local search on the critical path.
#pragma once

#include "layout/exact.h"
#include "layout/problem.h"

namespace memtune::layout {

// Places buffers as they come in time, each into the smallest gap that holds it: always quick, any number of buffers.
Layout best_fit(const Instance& instance);

// Places buffers in `order`, each at the lowest offset that is free over its lifetime. False as soon as one does not end below
// `below`, and where the clock stopped it.
bool first_fit(const Instance& instance, const std::vector<std::int32_t>& order, std::int64_t below, const Clock& clock, Layout& layout);

// Simulated annealing over orders in which every buffer rests on the highest end below it. Moves touch the critical path, the
// chain of buffers that makes the height (after Imanishi and Xu, ISMM 2024, who orient the graph of buffers that meet).
Layout local_search(const Instance& instance, Layout start, std::int64_t goal, std::uint64_t seed, const Clock& clock);

// All of it, until no higher than `goal` (in units) or the clock is over.
Layout pack(const Instance& instance, std::int64_t goal, std::uint64_t seed, const Clock& clock);

// The exact tier with a fallback: `improve`, and where it has neither reached `goal` nor ended with a proof after most of the time,
// the orders and the local search of `pack` from the best layout so far.
Exact solve(const Instance& instance, Layout start, std::int64_t goal, std::uint64_t seed, double limit_s);

}  // namespace memtune::layout
