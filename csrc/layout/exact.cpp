#include "layout/exact.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "layout/search.h"

namespace memtune::layout {

namespace {

constexpr std::int32_t kMostBuffers = 8192;
constexpr std::int64_t kFirstNodes = 1000;

// Ranks by the largest total of a section that the buffer is in, by its size, its length and its area, lengths in time and in
// sections, each with every way to choose a section. None is good for all instances, and each is either lucky soon or lost for
// long: each gets its turn, with a limit, and the limit grows.
std::vector<Strategy> strategies(const Instance& instance) {
  const std::vector<std::int64_t> totals = section_totals(instance);
  const std::int32_t n = instance.n();
  std::vector<double> total(n), size(n), length(n), width(n), area(n), cells(n);
  for (std::int32_t b = 0; b < n; ++b) {
    for (const Piece piece : instance.pieces[b]) {
      width[b] += piece.hi - piece.lo;
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) total[b] = std::max(total[b], static_cast<double>(totals[s]));
    }
    size[b] = static_cast<double>(instance.size[b]);
    length[b] = static_cast<double>(instance.duration[b]);
    area[b] = length[b] * size[b];
    cells[b] = width[b] * size[b];
  }
  std::vector<Strategy> made;
  const auto add = [&](const std::vector<double>& first, const std::vector<double>& second) {
    std::vector<std::int32_t> order(n), rank(n);
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](std::int32_t b) { return std::pair(first[b], second[b]); };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return key(a) > key(b); });
    for (std::int32_t i = 0; i < n; ++i) rank[order[i]] = i;
    for (const Choice choice : {Choice::kFewest, Choice::kTightest, Choice::kRanked, Choice::kForced}) made.push_back({choice, rank});
  };
  add(total, length);
  add(length, size);
  add(size, width);
  add(area, total);
  add(total, size);
  add(cells, total);
  return made;
}

}  // namespace

Exact improve(const Instance& instance, Layout seed, std::int64_t goal, const Clock& clock) {
  const std::vector<std::int64_t> totals = section_totals(instance);
  Exact best{std::move(seed), totals.empty() ? 0 : *std::max_element(totals.begin(), totals.end())};
  const auto done = [&] { return best.layout.height <= std::max(goal, best.lower_bound) || clock.over(); };
  if (done()) return best;
  best.tried = instance.n() <= kMostBuffers;
  if (!best.tried) return best;
  Search search(instance);
  const std::vector<Strategy> tries = strategies(instance);
  const auto attempt = [&](std::int64_t capacity, std::int64_t nodes) {
    for (const Strategy& strategy : tries) {
      const Outcome outcome = search.run(capacity, strategy, nodes, clock);
      best.nodes += search.nodes();
      if (outcome == Outcome::kFound) best.layout = search.layout();
      if (outcome != Outcome::kStopped) return outcome;
    }
    return Outcome::kStopped;
  };
  // Bisection between what is impossible and what is known; what stays open is asked again with more patience.
  for (std::int64_t nodes = kFirstNodes; !done(); nodes *= 4) {
    std::int64_t lowest = std::max(goal, best.lower_bound);
    while (!done() && lowest < best.layout.height) {
      const std::int64_t capacity = goal >= best.lower_bound ? goal : lowest + (best.layout.height - 1 - lowest) / 2;
      const Outcome outcome = attempt(capacity, nodes);
      if (outcome == Outcome::kNone) best.lower_bound = capacity + 1;
      if (outcome != Outcome::kFound) lowest = capacity + 1;
      if (goal >= capacity) break;
    }
  }
  return best;
}

}  // namespace memtune::layout
