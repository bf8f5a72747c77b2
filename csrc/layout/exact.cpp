#include "layout/exact.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "layout/search.h"

namespace memtune::layout {

namespace {

constexpr std::int32_t kMostBuffers = 8192;
constexpr std::int64_t kFirstNodes = 1000;  // and twice the buffers: each is placed once at least
constexpr double kMorePatience = 1.1, kNoise = 0.4;

struct Keys {
  std::vector<double> first, second;  // by buffer: larger ones come first
};

// The largest total of a section that the buffer is in, its size, its length and its area; lengths in time and in sections.
std::vector<Keys> make_keys(const Instance& instance) {
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
  return {{total, length}, {length, size}, {size, width}, {area, total}, {total, size}, {cells, total}};
}

// Ranks by each pair of keys, each with every way to choose a section. None is good for all instances, and each is either lucky soon
// or lost for long (heavy tails: Gomes, Selman, Kautz, AAAI 1998): each gets its turn, with a limit, and another round, in which the
// limit is larger, changes the first keys by up to a fifth at random.
std::vector<Strategy> strategies(const std::vector<Keys>& keys, std::uint64_t round) {
  std::vector<Strategy> made;
  std::mt19937_64 random(round);
  for (Keys each : keys) {
    if (round > 0) {
      for (double& key : each.first) key *= std::exp(kNoise * (static_cast<double>(random() >> 11) / 9007199254740992.0 - 0.5));
    }
    const auto n = static_cast<std::int32_t>(each.first.size());
    std::vector<std::int32_t> order(n), rank(n);
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](std::int32_t b) { return std::pair(each.first[b], each.second[b]); };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return key(a) > key(b); });
    for (std::int32_t i = 0; i < n; ++i) rank[order[i]] = i;
    for (const Choice choice : {Choice::kLearned, Choice::kFewest, Choice::kTightest, Choice::kRanked, Choice::kForced}) {
      made.push_back({choice, rank});
    }
  }
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
  const std::vector<Keys> keys = make_keys(instance);
  std::vector<Strategy> tries;
  const auto attempt = [&](std::int64_t capacity, std::int64_t nodes) {
    for (const Strategy& strategy : tries) {
      if (clock.over()) break;
      const Outcome outcome = search.run(capacity, strategy, nodes, clock);
      best.nodes += search.nodes();
      if (outcome == Outcome::kFound) best.layout = search.layout();
      if (outcome != Outcome::kStopped) return outcome;
    }
    return Outcome::kStopped;
  };
  // Bisection between what is impossible and what is known; what stays open is asked again with more patience.
  double nodes = kFirstNodes + 2 * instance.n();
  for (std::uint64_t round = 0; !done(); ++round, nodes *= kMorePatience) {
    tries = strategies(keys, round);
    std::int64_t lowest = std::max(goal, best.lower_bound);
    while (!done() && lowest < best.layout.height) {
      const std::int64_t capacity = goal >= best.lower_bound ? goal : lowest + (best.layout.height - 1 - lowest) / 2;
      const Outcome outcome = attempt(capacity, static_cast<std::int64_t>(nodes));
      if (outcome == Outcome::kNone) best.lower_bound = capacity + 1;
      if (outcome != Outcome::kFound) lowest = capacity + 1;
      if (goal >= capacity) break;
    }
  }
  return best;
}

}  // namespace memtune::layout
