#include "layout/search.h"

#include <algorithm>
#include <numeric>

namespace memtune::layout {

namespace {

constexpr std::size_t kFailures = std::size_t{1} << 18;
constexpr std::int64_t kScale = 1'000'000;  // of kLearned's quotients

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

Search::Search(const Instance& instance)
    : instance_(instance), size_(instance.size), pieces_(instance.pieces), neighbours_(meeting(instance.pieces, instance.n_sections)) {
  rest_.resize(size_.size());
  floor_.resize(size_.size());
  placed_.resize(size_.size());
  sections_.resize(instance.n_sections);
  label_.resize(instance.n_sections + 1);
  too_full_.assign(instance.n_sections, 1);
}

Outcome Search::run(std::int64_t capacity, const Strategy& strategy, std::int64_t node_limit, const Clock& clock) {
  // Failures depend on the capacity; under the same one those of earlier runs are still valid.
  if (capacity != capacity_) failed_.assign(kFailures, Key{});
  capacity_ = capacity;
  strategy_ = &strategy;
  nodes_ = 0;
  node_limit_ = node_limit;
  clock_ = &clock;
  std::fill(rest_.begin(), rest_.end(), 0);
  std::fill(floor_.begin(), floor_.end(), 0);
  std::fill(placed_.begin(), placed_.end(), 0);
  changes_.clear();
  pool_.resize(size_.size());
  std::iota(pool_.begin(), pool_.end(), 0);
  return solve_parts({0, pool_.size()}, -1);
}

Layout Search::layout() const {
  Layout layout{floor_, 0};
  for (std::size_t b = 0; b < size_.size(); ++b) layout.height = std::max(layout.height, floor_[b] + size_[b]);
  return layout;
}

// Numbers the sections of `part` without `placed` in label_, from 0 on, a new number where no lifetime crosses; the last number.
std::int32_t Search::number_parts(Part part, std::int32_t placed) {
  std::int32_t lo = instance_.n_sections, hi = 0;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const auto& [first, second] = pieces_[pool_[i]];
    lo = second.hi > 0 ? 0 : std::min(lo, first.lo);
    hi = std::max(hi, first.hi);
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
  return number;
}

// Rule 5. The buffers of `part` but `placed`, cut where no lifetime crosses; small parts first, as they fail first.
std::vector<Search::Part> Search::split(Part part, std::int32_t placed) {
  const std::int32_t number = number_parts(part, placed);
  std::vector<std::int32_t> joined(number + 1);
  std::iota(joined.begin(), joined.end(), 0);
  const auto root = [&joined](std::int32_t x) {
    while (joined[x] != x) x = joined[x] = joined[joined[x]];
    return x;
  };
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const auto& [first, second] = pieces_[pool_[i]];
    // A lifetime that wraps around the step joins the parts at its two ends.
    if (second.hi > 0 && pool_[i] != placed) joined[root(label_[first.lo])] = root(label_[second.lo]);
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
  for (const Part each : split(part, placed)) {
    outcome = solve(each);
    if (outcome == Outcome::kFound) continue;
    // Undo the placements of earlier parts.
    for (std::size_t i = pool; i < pool_.size(); ++i) placed_[pool_[i]] = 0;
    break;
  }
  pool_.resize(pool);
  return outcome;
}

// The unplaced buffers, where they rest and how far they are lifted.
Search::Key Search::key(Part part) const {
  Key key;
  for (std::size_t i = part.begin; i < part.end; ++i) {
    const std::int32_t b = pool_[i];
    // Sums of hashes: the order in which the buffers were placed does not matter.
    const std::uint64_t lifted = spread(static_cast<std::uint64_t>(floor_[b] - rest_[b]));
    const std::uint64_t row = spread(static_cast<std::uint64_t>(b) ^ spread(static_cast<std::uint64_t>(rest_[b]) ^ lifted));
    key.low += row;
    key.high += spread(row);
  }
  return key;
}

void Search::raise(std::int32_t b, std::int64_t floor) {
  changes_.push_back({b, floor_[b], rest_[b]});
  floor_[b] = instance_.align(floor, b);
}

// Rules 3 and 4, until nothing rises; false where there is no layout.
bool Search::lift(Part part) {
  for (bool rising = true; rising;) {
    rising = false;
    for (std::size_t i = part.begin; i < part.end; ++i) {
      const std::int32_t b = pool_[i];
      if (floor_[b] == rest_[b]) continue;
      std::int64_t lowest = kNever, lowest_end = kNever;
      for (const std::int32_t other : neighbours_[b]) {
        if (placed_[other]) continue;
        lowest = std::min(lowest, floor_[other]);
        lowest_end = std::min(lowest_end, floor_[other] + size_[other]);
      }
      if (lowest >= rest_[b] + size_[b] || lowest_end + size_[b] > capacity_) return false;
      if (lowest_end <= floor_[b]) continue;
      raise(b, lowest_end);
      rising = true;
    }
  }
  return true;
}

// Adds a buffer, the next one by (floor, rank), to its sections; false where they exceed the capacity (Rule 2).
bool Search::stack(std::int32_t b) {
  const std::int64_t floor = floor_[b], size = size_[b];
  std::int64_t top = 0;
  bool low = true, lowest = false;  // in all of its sections, in some
  for (const Piece piece : pieces_[b]) {
    for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
      Section& section = sections_[s];
      if (section.floor == kNever) section.floor = floor;
      else if (section.next == kNever) section.next = floor;
      if (section.floor < floor) {
        low = false;
        if (section.above == kNever) section.above = floor;
      } else {
        lowest = true;
      }
      section.sum += size;
      section.top = std::max(section.top, floor) + size;
      top = std::max(top, section.top);
    }
  }
  if (top > capacity_) {
    for (const Piece piece : pieces_[b]) {
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) too_full_[s] += sections_[s].top > capacity_ ? 1 : 0;
    }
    return false;
  }
  if (!lowest) return true;
  if (low) low_.push_back(b);
  for (const Piece piece : pieces_[b]) {
    for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
      Section& section = sections_[s];
      if (section.floor < floor) continue;
      if (low && section.n_low++ == 0) section.first = b;
      section.all_low &= low;
    }
  }
  return true;
}

// Describes the sections of `part` and sorts its buffers by floor and rank; false where there is no layout.
bool Search::survey(Part part) {
  if (!lift(part)) return false;
  const std::vector<std::int32_t>& rank = strategy_->rank;
  const auto first = pool_.begin() + static_cast<std::ptrdiff_t>(part.begin), last = pool_.begin() + static_cast<std::ptrdiff_t>(part.end);
  std::sort(first, last, [&](std::int32_t a, std::int32_t b) { return floor_[a] != floor_[b] ? floor_[a] < floor_[b] : rank[a] < rank[b]; });
  low_.clear();
  smallest_ = kNever;
  std::int32_t lo = instance_.n_sections, hi = 0;
  for (auto each = first; each != last; ++each) {
    smallest_ = std::min(smallest_, size_[*each]);
    for (const Piece piece : pieces_[*each]) {
      if (piece.lo < piece.hi) lo = std::min(lo, piece.lo), hi = std::max(hi, piece.hi);
    }
  }
  std::fill(sections_.begin() + lo, sections_.begin() + hi, Section{});  // also clears sections of other parts, which are surveyed again later
  return std::all_of(first, last, [this](std::int32_t b) { return stack(b); });
}

// Whether one that is not placed can come to where the low buffer would be (Rule 4).
bool Search::reachable(std::int32_t b) const {
  for (const Piece piece : pieces_[b]) {
    for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
      if (sections_[s].next < floor_[b] + size_[b]) return true;
    }
  }
  return false;
}

// Sort key of a section under the strategy; the smallest is next.
std::array<std::int64_t, 3> Search::urgency(std::int32_t s) const {
  const Section& section = sections_[s];
  // If none of the low buffers is next, the section wastes what is below the next floor, or below the end of one that lifts them.
  const bool wasteful = std::min(section.above, section.floor + smallest_) + section.sum <= capacity_;
  const std::int64_t options = section.n_low + (wasteful ? 1 : 0), slack = capacity_ - section.floor - section.sum;
  switch (strategy_->choice) {
    case Choice::kFewest: return {options, slack, section.floor};
    case Choice::kForced: return {options > 1, section.floor, slack};
    case Choice::kTightest: return {section.floor, slack, options};
    case Choice::kLearned: return {options > 1 ? options * kScale / too_full_[s] : 0, slack, section.floor};
    case Choice::kRanked: break;
  }
  return {section.floor, strategy_->rank[section.first], 0};
}

// The low buffer to decide. The lowest of the part are all low, so there is a section that has no others.
std::int32_t Search::choose() const {
  std::int32_t best = -1;
  std::array<std::int64_t, 3> least{kNever, kNever, kNever};
  for (const std::int32_t b : low_) {
    for (const Piece piece : pieces_[b]) {
      for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
        if (sections_[s].first != b || !sections_[s].all_low) continue;
        const std::array<std::int64_t, 3> each = urgency(s);
        if (each >= least) continue;
        least = each;
        best = b;
      }
    }
  }
  return best;
}

bool Search::place(std::int32_t b) {
  placed_[b] = 1;
  const std::int64_t end = floor_[b] + size_[b];
  for (const std::int32_t other : neighbours_[b]) {
    if (placed_[other] || rest_[other] >= end) continue;
    changes_.push_back({other, floor_[other], rest_[other]});
    rest_[other] = instance_.align(end, other);
    floor_[other] = std::max(floor_[other], rest_[other]);
    if (floor_[other] + size_[other] > capacity_) return false;
  }
  return true;
}

void Search::take_back(std::int32_t b, std::size_t changes) {
  placed_[b] = 0;
  while (changes_.size() > changes) {
    floor_[changes_.back().buffer] = changes_.back().floor;
    rest_[changes_.back().buffer] = changes_.back().rest;
    changes_.pop_back();
  }
}

// Changes stay where it fails: the caller takes them back.
Outcome Search::solve(Part part) {
  if (part.end - part.begin == 1) {
    const std::int32_t b = pool_[part.begin];
    return floor_[b] == rest_[b] && floor_[b] + size_[b] <= capacity_ ? Outcome::kFound : Outcome::kNone;
  }
  if (!survey(part)) return Outcome::kNone;
  const Key left = key(part);
  // A lossy table: a collision forgets an entry, and 128 bits make a false match negligible.
  if (failed_[left.low % kFailures] == left) return Outcome::kNone;
  for (bool open = true; open; open = open && survey(part)) {
    // No other buffer can come below it, so there is nothing to decide.
    const auto sure = std::find_if(low_.begin(), low_.end(), [this](std::int32_t b) { return !reachable(b); });
    open = sure == low_.end();
    const std::int32_t b = open ? choose() : *sure;
    if (++nodes_ > node_limit_ || (nodes_ % 256 == 0 && clock_->over())) return Outcome::kStopped;
    const std::size_t changes = changes_.size();
    const Outcome outcome = place(b) ? solve_parts(part, b) : Outcome::kNone;
    if (outcome != Outcome::kNone) return outcome;
    take_back(b, changes);
    // The other branch: this buffer does not rest here but is lifted by another one.
    if (open) raise(b, floor_[b] + 1);
  }
  failed_[left.low % kFailures] = left;
  return Outcome::kNone;
}

}  // namespace memtune::layout
