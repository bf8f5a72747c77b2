#include "layout/heuristic.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

namespace memtune::layout {

namespace {

// Free bytes by offset and by size; the last gap has no end.
class Gaps {
 public:
  Gaps() { add(0, kEndless); }

  std::int64_t take(const Instance& instance, std::int32_t b) {
    const std::int64_t size = instance.size[b];
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

// Placed buffers in order of offset, in runs short enough to insert into.
class Placed {
 public:
  struct Row {
    std::int64_t offset, end;
    std::array<Piece, 2> pieces;
  };

  std::int64_t lowest(const Instance& instance, std::int32_t b) const {
    const auto& pieces = instance.pieces[b];
    const std::int64_t size = instance.size[b];
    std::int64_t floor = 0;
    for (const Run& run : runs_) {
      if (!meet(run.hull, pieces)) continue;
      for (const Row& row : run.rows) {
        if (!meet(row.pieces, pieces)) continue;
        if (row.offset - floor >= size) return floor;
        if (row.end > floor) floor = instance.align(row.end, b);
      }
    }
    return floor;
  }

  void add(const Row& row) {
    auto run = std::lower_bound(runs_.begin(), runs_.end(), row.offset, [](const Run& r, std::int64_t at) { return r.rows.back().offset < at; });
    if (run == runs_.end()) {
      if (runs_.empty()) runs_.emplace_back();
      run = std::prev(runs_.end());
    }
    auto& rows = run->rows;
    rows.insert(std::lower_bound(rows.begin(), rows.end(), row.offset, [](const Row& r, std::int64_t at) { return r.offset < at; }), row);
    for (std::size_t k = 0; k < 2; ++k) widen(run->hull[k], row.pieces[k]);
    if (rows.size() < kRun) return;
    Run upper;
    upper.rows.assign(rows.begin() + kRun / 2, rows.end());
    rows.resize(kRun / 2);
    run->hull = hull(rows);
    upper.hull = hull(upper.rows);
    runs_.insert(std::next(run), std::move(upper));
  }

 private:
  static constexpr std::size_t kRun = 256;
  struct Run {
    std::vector<Row> rows;
    std::array<Piece, 2> hull;
  };

  static bool meet(Piece a, Piece b) { return a.lo < b.hi && b.lo < a.hi; }
  static bool meet(const std::array<Piece, 2>& a, const std::array<Piece, 2>& b) {
    if (meet(a[0], b[0])) return true;
    if (a[1].hi == 0 && b[1].hi == 0) return false;
    return meet(a[0], b[1]) || meet(a[1], b[0]) || meet(a[1], b[1]);
  }
  static void widen(Piece& hull, Piece piece) {
    if (piece.hi == 0) return;
    hull = hull.hi == 0 ? piece : Piece{std::min(hull.lo, piece.lo), std::max(hull.hi, piece.hi)};
  }
  static std::array<Piece, 2> hull(const std::vector<Row>& rows) {
    std::array<Piece, 2> made;
    for (const Row& row : rows) {
      for (std::size_t k = 0; k < 2; ++k) widen(made[k], row.pieces[k]);
    }
    return made;
  }

  std::vector<Run> runs_;
};

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
  add([&](std::int32_t b) { return size(b) * static_cast<double>(width[b]); });
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
      take(b);  // what wraps keeps its place for good here
    } else {
      begins[first.lo].push_back(b);
      ends[first.hi].push_back(b);
    }
  }
  for (std::int32_t s = 0; s < instance.n_sections; ++s) {
    for (const std::int32_t b : ends[s]) gaps.give_back(layout.offset[b], instance.size[b]);
    for (const std::int32_t b : begins[s]) take(b);
  }
  return layout;
}

bool first_fit(const Instance& instance, const std::vector<std::int32_t>& order, const Clock& clock, Layout& layout) {
  layout = {std::vector<std::int64_t>(instance.n()), 0};
  Placed placed;
  std::int32_t count = 0;
  for (const std::int32_t b : order) {
    if (++count % 64 == 0 && clock.over()) return false;
    const std::int64_t offset = placed.lowest(instance, b), end = offset + instance.size[b];
    placed.add({offset, end, instance.pieces[b]});
    layout.offset[b] = offset;
    layout.height = std::max(layout.height, end);
  }
  return true;
}

Layout pack(const Instance& instance, std::int64_t goal, std::uint64_t seed, const Clock& clock) {
  Layout best = best_fit(instance);
  for (const auto& order : orders(instance)) {
    Layout layout;
    if (best.height <= goal || !first_fit(instance, order, clock, layout)) break;
    if (layout.height < best.height) best = std::move(layout);
  }
  return best.height <= goal || clock.over() ? best : local_search(instance, std::move(best), goal, seed, clock);
}

}  // namespace memtune::layout
