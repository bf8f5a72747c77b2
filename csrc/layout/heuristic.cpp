#include "layout/heuristic.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "layout/exact.h"

namespace memtune::layout {

namespace {

// Free bytes by offset and by size; the last gap has no end.
class Gaps {
 public:
  Gaps() { add(0, kEndless); }

  std::int64_t take(const Instance& instance, std::int32_t b) {
    const std::int64_t size = instance.size[b];
    // Best fit: the smallest gap; alignment may need a larger one.
    auto gap = by_size_.lower_bound({size, 0});
    while (instance.align(gap->second, b) + size > gap->second + gap->first) ++gap;
    const auto [length, from] = *gap;
    const std::int64_t offset = instance.align(from, b);
    remove(from, length);
    if (offset > from) add(from, offset - from);
    if (offset + size < from + length) add(offset + size, from + length - offset - size);
    return offset;
  }

  void give_back(std::int64_t offset, std::int64_t size) {
    const auto after = by_offset_.lower_bound(offset);
    if (after != by_offset_.begin()) {
      const auto [from, length] = *std::prev(after);
      if (from + length == offset) {
        remove(from, length);
        offset = from;
        size += length;
      }
    }
    const auto next = by_offset_.find(offset + size);
    if (next != by_offset_.end()) {
      const std::int64_t length = next->second;
      remove(offset + size, length);
      size += length;
    }
    add(offset, size);
  }

 private:
  static constexpr std::int64_t kEndless = std::int64_t{1} << 62;

  void add(std::int64_t from, std::int64_t length) {
    by_offset_[from] = length;
    by_size_.insert({length, from});
  }
  void remove(std::int64_t from, std::int64_t length) {
    by_offset_.erase(from);
    by_size_.erase({length, from});
  }

  std::map<std::int64_t, std::int64_t> by_offset_;
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;
};

struct Range {
  std::int64_t from, to;
};

// The end of the ranges that overlap [at, at + size), or `at`. `left` are ascending ranges; those that end before are removed from it.
std::int64_t past(std::span<const Range>& left, std::int64_t at, std::int64_t size) {
  const Range* row = left.data();
  const Range* const end = row + left.size();
  if (row != end && row->to <= at) {
    std::ptrdiff_t step = 1;
    while (step < end - row && row[step].to <= at) step *= 2;
    row = std::lower_bound(row + step / 2 + 1, std::min(row + step, end), at, [](const Range& r, std::int64_t at) { return r.to <= at; });
  }
  while (row != end && row->from < at + size) at = (row++)->to;
  left = {row, end};
  return at;
}

// Offsets that are taken at some moments: ascending ranges that neither overlap nor touch.
class Taken {
 public:
  void add(std::int64_t from, std::int64_t to) {
    const auto first = std::lower_bound(ranges_.begin(), ranges_.end(), from, [](const Range& r, std::int64_t at) { return r.to < at; });
    auto last = first;
    for (; last != ranges_.end() && last->from <= to; ++last) {
      from = std::min(from, last->from);
      to = std::max(to, last->to);
    }
    if (first == last) {
      ranges_.insert(first, {from, to});
    } else {
      *first = {from, to};
      ranges_.erase(std::next(first), last);
    }
  }

  std::span<const Range> ranges() const { return ranges_; }

 private:
  std::vector<Range> ranges_;
};

// Placed buffers in a segment tree over the sections. A node has the ranges taken in all of its sections (by buffers that do not cover
// its parent), and those taken in any of them; so a lifetime is stored in logarithmically many nodes.
class Placed {
 public:
  explicit Placed(std::int32_t n_sections) : n_(n_sections), whole_(4 * static_cast<std::size_t>(n_sections)), any_(whole_.size()) {}

  void add(const std::array<Piece, 2>& pieces, std::int64_t from, std::int64_t to) {
    for (const Piece piece : pieces) {
      if (piece.lo < piece.hi) add(piece, 1, {0, n_}, from, to);
    }
  }

  std::int64_t lowest(const Instance& instance, std::int32_t b) {
    asked_.clear();
    for (const Piece piece : instance.pieces[b]) {
      if (piece.lo < piece.hi) collect(piece, 1, {0, n_});
    }
    std::sort(asked_.begin(), asked_.end(), [](const auto& one, const auto& other) { return one.size() > other.size(); });
    std::int64_t at = 0;
    for (std::size_t i = 0; i < asked_.size();) {  // a place is good where all agree; who was in the way often is so again
      const std::int64_t next = past(asked_[i], at, instance.size[b]);
      if (next == at) {
        ++i;
        continue;
      }
      at = instance.align(next, b);
      std::swap(asked_[i], asked_[i / 2]);
      i = 0;
    }
    return at;
  }

 private:
  void add(Piece piece, std::size_t node, Piece span, std::int64_t from, std::int64_t to) {
    any_[node].add(from, to);
    if (piece.lo <= span.lo && span.hi <= piece.hi) return whole_[node].add(from, to);
    const std::int32_t middle = (span.lo + span.hi) / 2;
    if (piece.lo < middle) add(piece, 2 * node, {span.lo, middle}, from, to);
    if (piece.hi > middle) add(piece, 2 * node + 1, {middle, span.hi}, from, to);
  }

  void collect(Piece piece, std::size_t node, Piece span) {
    const bool inside = piece.lo <= span.lo && span.hi <= piece.hi;
    const std::span<const Range> taken = (inside ? any_ : whole_)[node].ranges();
    if (!taken.empty()) asked_.push_back(taken);
    if (inside || any_[node].ranges().empty()) return;
    const std::int32_t middle = (span.lo + span.hi) / 2;
    if (piece.lo < middle) collect(piece, 2 * node, {span.lo, middle});
    if (piece.hi > middle) collect(piece, 2 * node + 1, {middle, span.hi});
  }

  std::int32_t n_;
  std::vector<Taken> whole_, any_;
  std::vector<std::span<const Range>> asked_;  // of one request: all that must agree
};

constexpr std::int32_t kMostSearched = 2048;  // beyond, a single layout takes the search too long
constexpr double kSearched = 0.3;             // of the time that is left: short searches at heights in between, before orders are changed
constexpr double kUnproven = 0.25;            // of the exact tier's time: for the heuristics, where the search proves and finds nothing
constexpr std::int32_t kMostByArea = 50'000;  // beyond, the order by area takes longest of all and has found nothing lower

// First the buffers that are always alive, which are best at the bottom, then by what the orders differ in.
std::vector<std::vector<std::int32_t>> orders(const Instance& instance) {
  const std::int32_t n = instance.n();
  std::vector<std::int64_t> width(n, 0), first(n);
  for (std::int32_t b = 0; b < n; ++b) {
    for (const Piece piece : instance.pieces[b]) width[b] += piece.hi - piece.lo;
    first[b] = instance.pieces[b][0].lo;
  }
  std::vector<std::vector<std::int32_t>> made;
  const auto add = [&](auto key) {
    std::vector<std::int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    const auto keys = [&](std::int32_t b) { return std::tuple(width[b] == instance.n_sections, key(b), width[b]); };
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return keys(a) > keys(b); });
    made.push_back(std::move(order));
  };
  const auto size = [&](std::int32_t b) { return static_cast<double>(instance.size[b]); };
  add([&](std::int32_t b) { return size(b); });
  add([&](std::int32_t b) { return static_cast<double>(width[b]); });
  if (n <= kMostByArea) add([&](std::int32_t b) { return size(b) * static_cast<double>(width[b]); });
  add([&](std::int32_t b) { return -static_cast<double>(first[b]); });
  return made;
}

}  // namespace

Layout best_fit(const Instance& instance) {
  Layout layout{std::vector<std::int64_t>(instance.n()), 0};
  Gaps gaps;
  std::vector<std::vector<std::int32_t>> begins(instance.n_sections), ends(instance.n_sections + 1);
  const auto take = [&](std::int32_t b) {
    layout.offset[b] = gaps.take(instance, b);
    layout.height = std::max(layout.height, layout.offset[b] + instance.size[b]);
  };
  for (std::int32_t b = 0; b < instance.n(); ++b) {
    const auto& [first, second] = instance.pieces[b];
    if (second.hi > 0) {
      take(b);  // a buffer that wraps keeps its place permanently
    } else {
      begins[first.lo].push_back(b);
      ends[first.hi].push_back(b);
    }
  }
  for (std::int32_t s = 0; s < instance.n_sections; ++s) {
    // Ends before begins: lifetimes are half open, so a place is free in the section where one ends.
    for (const std::int32_t b : ends[s]) gaps.give_back(layout.offset[b], instance.size[b]);
    for (const std::int32_t b : begins[s]) take(b);
  }
  return layout;
}

bool first_fit(const Instance& instance, const std::vector<std::int32_t>& order, std::int64_t below, const Clock& clock, Layout& layout) {
  layout = {std::vector<std::int64_t>(instance.n()), 0};
  Placed placed(instance.n_sections);
  std::int32_t count = 0;
  for (const std::int32_t b : order) {
    // Asking the clock costs as much as placing a few buffers.
    if (++count % 64 == 0 && clock.over()) return false;
    const std::int64_t offset = placed.lowest(instance, b), end = offset + instance.size[b];
    // No better than the best so far, whatever comes.
    if (end >= below) return false;
    placed.add(instance.pieces[b], offset, end);
    layout.offset[b] = offset;
    layout.height = std::max(layout.height, end);
  }
  return true;
}

namespace {

Layout lowest_order(const Instance& instance, Layout best, std::int64_t goal, const Clock& clock) {
  for (const auto& order : orders(instance)) {
    Layout layout;
    if (best.height <= goal || clock.over()) break;
    if (first_fit(instance, order, best.height, clock, layout)) best = std::move(layout);
  }
  return best;
}

}  // namespace

Layout pack(const Instance& instance, std::int64_t goal, std::uint64_t seed, const Clock& clock) {
  Layout best = lowest_order(instance, best_fit(instance), goal, clock);
  if (best.height <= goal || clock.over()) return best;
  if (instance.n() <= kMostSearched) {
    const Clock part(kSearched * clock.left_s());
    best = improve(instance, std::move(best), goal, part).layout;
  }
  return best.height <= goal || clock.over() ? best : local_search(instance, std::move(best), goal, seed, clock);
}

Exact solve(const Instance& instance, Layout start, std::int64_t goal, std::uint64_t seed, double limit_s) {
  const Clock clock(limit_s);
  Exact found = improve(instance, std::move(start), goal, Clock((1 - kUnproven) * limit_s));
  const std::int64_t enough = std::max(goal, found.lower_bound);
  if (found.layout.height <= enough || clock.over()) return found;
  found.layout = lowest_order(instance, std::move(found.layout), enough, clock);
  if (found.layout.height > enough && !clock.over()) found.layout = local_search(instance, std::move(found.layout), enough, seed, clock);
  return found;
}

}  // namespace memtune::layout
