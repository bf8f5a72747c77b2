// The exact tier: a search over canonical layouts. Ideas published by Moffitt, MiniMalloc: A Lightweight Memory Allocator for
// Hardware-Accelerated Machine Learning (ASPLOS 2023).
#pragma once

#include "layout/problem.h"

namespace memtune::layout {

struct Exact {
  Layout layout;              // the best known
  std::int64_t lower_bound;   // no layout is lower, in units
  std::int64_t nodes = 0;     // placements tried
  bool tried = true;          // false where the instance is too large for this tier
};

// Improves `seed` until it is no higher than `goal` or the proven optimum (`lower_bound` then equals its height), or time is up.
Exact improve(const Instance& instance, Layout seed, std::int64_t goal, const Clock& clock);

}  // namespace memtune::layout
