#include "layout/search.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace memtune::layout {

namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;

constexpr std::size_t kFailures = std::size_t{1} << 18;

// Spreads a number over 64 bits (the finalizer of SplitMix64, Steele et al. 2014).
std::uint64_t spread(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::vector<std::vector<std::int32_t>> meeting(const std::vector<std::array<Piece, 2>>& pieces, std::int32_t n_sections) {
  std::vector<std::vector<std::int32_t>> alive(n_sections), neighbours(pieces.size());
  for (std::size_t b = 0; b < pieces.size(); ++b) {
    for (const Piece piece : pieces[b]) {
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) alive[s].push_back(static_cast<std::int32_t>(b));
    }
  }
  std::vector<std::int32_t> seen(pieces.size(), -1);
  for (std::size_t b = 0; b < pieces.size(); ++b) {
    seen[b] = static_cast<std::int32_t>(b);
    for (const Piece piece : pieces[b]) {
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
        for (const std::int32_t other : alive[s]) {
          if (seen[other] == static_cast<std::int32_t>(b)) continue;
          seen[other] = static_cast<std::int32_t>(b);
          neighbours[b].push_back(other);
        }
      }
    }
    std::sort(neighbours[b].begin(), neighbours[b].end());
  }
  return neighbours;
}

}  // namespace

Search::Search(const Instance& instance, std::vector<std::int32_t> order) : instance_(instance), order_(std::move(order)) {
  for (const std::int32_t b : order_) {
    size_.push_back(instance.size[b]);
    pieces_.push_back(instance.pieces[b]);
  }
  neighbours_ = meeting(pieces_, instance.n_sections);
  floor_.resize(order_.size());
  at_least_.resize(order_.size());
  placed_.resize(order_.size());
  stacked_.resize(instance.n_sections);
  label_.resize(instance.n_sections + 1);
}

Outcome Search::run(std::int64_t capacity, std::int64_t node_limit, const Clock& clock) {
  capacity_ = capacity;
  nodes_ = 0;
  node_limit_ = node_limit;
  clock_ = &clock;
  std::fill(floor_.begin(), floor_.end(), 0);
  std::fill(placed_.begin(), placed_.end(), 0);
  failed_.assign(kFailures, Key{});
  changes_.clear();
  pool_.resize(order_.size());
  std::iota(pool_.begin(), pool_.end(), 0);
  return solve_parts({0, pool_.size()}, -1);
}

Layout Search::layout() const {
  Layout layout{std::vector<std::int64_t>(order_.size()), 0};
  for (std::size_t b = 0; b < order_.size(); ++b) {
    layout.offset[order_[b]] = floor_[b];
    layout.height = std::max(layout.height, floor_[b] + size_[b]);
  }
  return layout;
}

// Rule 5. The buffers of `part` but `placed`, cut where no lifetime crosses; small parts first, as they fail first.
std::vector<Search::Part> Search::split(Part part, std::int32_t placed) {
  std::int32_t lo = instance_.n_sections, hi = 0;
  bool wraps = false;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const auto& [first, second] = pieces_[pool_[i]];
    lo = second.hi > 0 ? 0 : std::min(lo, first.lo);
    hi = std::max(hi, first.hi);
    wraps |= second.hi > 0;
  }
  std::fill(label_.begin() + lo, label_.begin() + hi + 1, 0);
  for (std::size_t i = part.begin; i < part.end; ++i) {
    if (pool_[i] == placed) continue;
    for (const Piece piece : pieces_[pool_[i]]) {
      if (piece.hi - piece.lo < 2) continue;
      ++label_[piece.lo];
      --label_[piece.hi - 1];
    }
  }
  // label_[s] is now how many more lifetimes cross from s to s + 1 than from s - 1 to s: made the number of the part.
  std::int32_t crossing = 0, number = 0;
  for (std::int32_t s = lo; s < hi; ++s) {
    crossing += label_[s];
    label_[s] = number;
    if (crossing == 0) ++number;
  }
  if (number == 0) number = 1;
  std::vector<std::int32_t> joined(number + 1);
  std::iota(joined.begin(), joined.end(), 0);
  const auto root = [&joined](std::int32_t x) {
    while (joined[x] != x) x = joined[x] = joined[joined[x]];
    return x;
  };
  if (wraps) {
    for (std::size_t i = part.begin; i < part.end; ++i) {
      if (pool_[i] == placed) continue;
      const auto& [first, second] = pieces_[pool_[i]];
      if (second.hi > 0) joined[root(label_[first.lo])] = root(label_[second.lo]);
    }
  }
  std::vector<std::size_t> count(number + 1, 0);
  for (std::size_t i = part.begin; i < part.end; ++i) {
    if (pool_[i] != placed) ++count[root(label_[pieces_[pool_[i]][0].lo])];
  }
  std::vector<Part> parts;
  std::vector<std::size_t> next(number + 1);
  std::size_t end = pool_.size();
  for (std::int32_t k = 0; k <= number; ++k) {
    if (count[k] == 0) continue;
    parts.push_back({end, end + count[k]});
    next[k] = end;
    end += count[k];
  }
  pool_.resize(end);
  for (std::size_t i = part.begin; i < part.end; ++i) {
    if (pool_[i] != placed) pool_[next[root(label_[pieces_[pool_[i]][0].lo])]++] = pool_[i];
  }
  std::sort(parts.begin(), parts.end(), [](Part a, Part b) { return a.end - a.begin < b.end - b.begin; });
  return parts;
}

Outcome Search::solve_parts(Part part, std::int32_t placed) {
  const std::size_t pool = pool_.size();
  Outcome outcome = Outcome::kFound;
  const std::int64_t from = placed < 0 ? 0 : floor_[placed];
  for (const Part each : split(part, placed)) {
    outcome = solve(each, from, placed);
    if (outcome != Outcome::kFound) break;
  }
  pool_.resize(pool);
  return outcome;
}

// The unplaced buffers with their floors. The floor of one that must be lifted first says nothing about where it will be.
Search::Key Search::key(Part part, std::int64_t from, std::int32_t from_rank) const {
  Key key;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const std::int32_t b = pool_[i];
    const std::int64_t floor = eligible(b, from, from_rank) ? floor_[b] : -1;
    const std::uint64_t row = spread(static_cast<std::uint64_t>(b) ^ spread(static_cast<std::uint64_t>(floor)));
    key.low += row;
    key.high += spread(row);
  }
  return key;
}

// Rule 3: false where nothing can lift the buffer.
bool Search::lift(std::int32_t b, std::int64_t from, std::int32_t from_rank) {
  std::int64_t lowest = kNever;
  for (const std::int32_t other : neighbours_[b]) {
    if (placed_[other] || !eligible(other, from, from_rank)) continue;
    lowest = std::min(lowest, floor_[other] + size_[other]);
  }
  at_least_[b] = lowest;
  return lowest + size_[b] <= capacity_;
}

// Sorts the buffers of `part` by what their offsets must at least be, and checks Rules 2 to 4; false where there is no layout.
bool Search::bound(Part part, std::int64_t from, std::int32_t from_rank, std::int64_t& lowest_end) {
  lowest_end = kNever;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const std::int32_t b = pool_[i];
    lowest_end = std::min(lowest_end, floor_[b] + size_[b]);
    at_least_[b] = floor_[b];
    for (const Piece piece : pieces_[b]) std::fill(stacked_.begin() + piece.lo, stacked_.begin() + piece.hi, 0);
  }
  if (lowest_end <= from) return false;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const std::int32_t b = pool_[i];
    if (!eligible(b, from, from_rank) && !lift(b, from, from_rank)) return false;
  }
  const auto first = pool_.begin() + static_cast<std::ptrdiff_t>(part.begin), last = pool_.begin() + static_cast<std::ptrdiff_t>(part.end);
  std::sort(first, last, [this](std::int32_t a, std::int32_t b) {
    return at_least_[a] != at_least_[b] ? at_least_[a] < at_least_[b] : a < b;
  });
  for (auto each = first; each != last; ++each) {
    const std::int32_t b = *each;
    const std::int64_t offset = at_least_[b], size = size_[b];
    std::int64_t top = 0;
    for (const Piece piece : pieces_[b]) {
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
        stacked_[s] = std::max(stacked_[s], offset) + size;
        top = std::max(top, stacked_[s]);
      }
    }
    if (top > capacity_) return false;
  }
  return true;
}

bool Search::place(std::int32_t b) {
  placed_[b] = 1;
  const std::int64_t end = floor_[b] + size_[b];
  for (const std::int32_t other : neighbours_[b]) {
    if (placed_[other] || floor_[other] >= end) continue;
    changes_.push_back({other, floor_[other]});
    floor_[other] = instance_.align(end, order_[other]);
    if (floor_[other] + size_[other] > capacity_) return false;
  }
  return true;
}

void Search::take_back(std::int32_t b, std::size_t changes) {
  placed_[b] = 0;
  while (changes_.size() > changes) {
    floor_[changes_.back().buffer] = changes_.back().floor;
    changes_.pop_back();
  }
}

Outcome Search::solve(Part part, std::int64_t from, std::int32_t from_rank) {
  if (part.end - part.begin == 1) {
    const std::int32_t b = pool_[part.begin];
    return floor_[b] + size_[b] <= capacity_ ? Outcome::kFound : Outcome::kNone;
  }
  std::int64_t lowest_end = kNever;
  if (!bound(part, from, from_rank, lowest_end)) return Outcome::kNone;
  const Key left = key(part, from, from_rank);
  if (failed_[left.low % kFailures] == left) return Outcome::kNone;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const std::int32_t b = pool_[i];
    if (!eligible(b, from, from_rank)) continue;
    if (floor_[b] >= lowest_end) break;
    if (++nodes_ > node_limit_ || (nodes_ % 256 == 0 && clock_->over())) return Outcome::kStopped;
    const std::size_t changes = changes_.size();
    const Outcome outcome = place(b) ? solve_parts(part, b) : Outcome::kNone;
    if (outcome == Outcome::kFound) return outcome;
    take_back(b, changes);
    if (outcome == Outcome::kStopped) return outcome;
  }
  failed_[left.low % kFailures] = left;
  return Outcome::kNone;
}

}  // namespace memtune::layout
