#include <algorithm>
#include <bit>
#include <queue>
#include <unordered_map>

#include "order/graph.h"

namespace memtune::order {

namespace {

using Set = std::uint64_t;  // of ops of the window, by their place in it

struct Item {  // a storage as the window sees it
  std::int64_t bytes;
  Set users;
};

struct State {
  std::int64_t peak, live;
  Set done;
  std::int32_t op;  // the last one, by its place
};

// Least peak first, then most ops done: among equals the search goes deep.
struct Worse {
  bool operator()(const State& a, const State& b) const {
    if (a.peak != b.peak) return a.peak > b.peak;
    return std::popcount(a.done) < std::popcount(b.done);
  }
};

}  // namespace

// The live storages after a set of ops do not depend on the ops' order. So this finds the path from the empty set to the full one with
// the lowest peak: sets are settled in order of their peaks, as in Dijkstra's algorithm. An op that frees at least as much as it makes,
// and fits below the peak so far, may always be next: no other order is better.
Ops best_order(const Graph& graph, const Memory& memory, std::span<const std::int32_t> window, std::size_t most_states) {
  const auto n = static_cast<std::int32_t>(window.size());
  std::unordered_map<std::int32_t, std::int32_t> place;
  for (std::int32_t i = 0; i < n; ++i) place[window[i]] = i;
  std::vector<Set> before(n, 0);
  std::vector<std::vector<Item>> goes(n);  // by op: storages that may go with it
  std::unordered_map<std::int32_t, Item> items;
  for (std::int32_t i = 0; i < n; ++i) {
    for (const std::int32_t other : graph.before[window[i]]) {
      if (const auto found = place.find(other); found != place.end()) before[i] |= Set{1} << found->second;
    }
    for (const std::int32_t s : graph.uses[window[i]]) {
      if (!graph.outlives[s]) items.try_emplace(s, Item{graph.bytes[s], 0}).first->second.users |= Set{1} << i;
    }
  }
  for (std::int32_t i = 0; i < n; ++i) {
    for (const std::int32_t s : graph.uses[window[i]]) {
      const auto found = items.find(s);
      if (found != items.end() && std::popcount(found->second.users) == memory.users_left(s)) goes[i].push_back(found->second);
    }
  }
  const Set all = n == 64 ? ~Set{0} : (Set{1} << n) - 1;
  std::unordered_map<Set, std::int32_t> settled;  // set → last op
  std::priority_queue<State, std::vector<State>, Worse> open;
  open.push({memory.live(), memory.live(), 0, -1});
  while (!open.empty()) {
    const State state = open.top();
    open.pop();
    if (!settled.try_emplace(state.done, state.op).second) continue;
    if (state.done == all) break;
    if (settled.size() > most_states) return {};
    std::vector<State> next;
    for (std::int32_t i = 0; i < n; ++i) {
      const Set me = Set{1} << i;
      if ((state.done & me) != 0 || (before[i] & ~state.done) != 0) continue;
      const std::int64_t running = state.live + graph.made_bytes[window[i]];
      std::int64_t live = running;
      for (const Item& item : goes[i]) {
        if ((item.users & ~(state.done | me)) == 0) live -= item.bytes;
      }
      const State then{std::max(state.peak, running), live, state.done | me, i};
      if (live <= state.live && running <= state.peak) {
        next.assign(1, then);
        break;
      }
      next.push_back(then);
    }
    for (const State& each : next) {
      if (!settled.contains(each.done)) open.push(each);
    }
  }
  Ops order(n);
  Set done = all;
  for (std::int32_t i = n - 1; i >= 0; --i) {
    const std::int32_t op = settled.at(done);
    order[i] = window[op];
    done &= ~(Set{1} << op);
  }
  return order;
}

}  // namespace memtune::order
