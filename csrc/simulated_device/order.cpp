#include "simulated_device/order.h"

#include <algorithm>
#include <utility>

namespace memtune::sim {
namespace {

void join(Clock& into, const Clock& other) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

}  // namespace

Tick Order::issue(int timeline) {
  Clock& clock = clocks_[timeline];
  if (timeline != kHost) join(clock, clocks_[kHost]);
  return ++clock[timeline];
}

void Order::wait(int timeline, const Clock& clock) { join(clocks_[timeline], clock); }

Clock Order::next_clock(int timeline) const {
  Clock clock = clocks_[timeline];
  join(clock, clocks_[kHost]);
  return clock;
}

void Order::split(std::uintptr_t at) {
  auto cell = cells_.upper_bound(at);
  if (cell == cells_.begin()) return;
  --cell;
  if (cell->first == at || cell->second.end <= at) return;
  Cell rest = cell->second;
  cell->second.end = at;
  cells_.emplace_hint(std::next(cell), at, std::move(rest));
}

void Order::use(Range range, const Use& use, std::vector<Race>& races) {
  split(range.begin);
  split(range.end);
  const Clock& clock = clocks_[use.timeline];
  const auto check = [&](const Use& earlier) {
    if (earlier.timeline >= 0 && !covers(clock, earlier)) races.push_back({range, earlier, use});
  };
  auto cell = cells_.lower_bound(range.begin);
  if (use.writes) {
    while (cell != cells_.end() && cell->first < range.end) {
      check(cell->second.write);
      for (const Use& read : cell->second.reads) check(read);
      cell = cells_.erase(cell);
    }
    cells_.emplace_hint(cell, range.begin, Cell{range.end, use, {}});
    return;
  }
  for (std::uintptr_t at = range.begin; at < range.end;) {
    if (cell == cells_.end() || cell->first > at) {  // bytes without a use so far
      const std::uintptr_t end = cell == cells_.end() ? range.end : std::min(range.end, cell->first);
      cells_.emplace_hint(cell, at, Cell{end, {}, {use}});
      at = end;
      continue;
    }
    Cell& present = cell->second;
    check(present.write);
    const auto own = std::find_if(present.reads.begin(), present.reads.end(),
                                  [&](const Use& read) { return read.timeline == use.timeline; });
    if (own == present.reads.end()) present.reads.push_back(use);
    else *own = use;
    at = present.end;
    ++cell;
  }
}

std::vector<Use> Order::uncovered(Range range, const Clock& clock) const {
  std::vector<Use> found;
  const auto check = [&](const Use& use) {
    if (use.timeline >= 0 && !covers(clock, use)) found.push_back(use);
  };
  auto cell = cells_.upper_bound(range.begin);
  if (cell != cells_.begin()) --cell;
  for (; cell != cells_.end() && cell->first < range.end; ++cell) {
    if (cell->second.end <= range.begin) continue;
    check(cell->second.write);
    for (const Use& read : cell->second.reads) check(read);
  }
  return found;
}

void Order::forget(Range range) {
  split(range.begin);
  split(range.end);
  cells_.erase(cells_.lower_bound(range.begin), cells_.lower_bound(range.end));
}

}  // namespace memtune::sim
