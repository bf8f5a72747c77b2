#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "order/graph.h"

namespace memtune::order {

namespace {

constexpr std::size_t kFewOps = 16;               // graphs so small are solved exactly, whatever they look like: 2^16 sets at most
constexpr std::size_t kWindowStates = 1 << 12;    // of a window around the peak
constexpr std::size_t kLongestFall = 24;          // ops looked ahead
constexpr int kTargets = 8, kWindows = 400;

std::int64_t peak_of(const Graph& graph, const Ops& order) {
  std::int64_t peak = 0;
  for (const std::int64_t live : live_bytes(graph, order)) peak = std::max(peak, live);
  return peak;
}

// Program order with falls moved up. A fall is an op, with ops that it makes ready, that together free more than they allocate. A fall
// runs as soon as it is ready and stays below `target`; running it early never makes a later peak higher.
class Falls {
 public:
  Falls(const Graph& graph, std::int64_t target) : graph_(graph), memory_(graph), target_(target), known_(graph.n_ops(), -1) {
    for (std::int32_t op = 0; op < graph.n_ops(); ++op) waits_.push_back(static_cast<std::int32_t>(graph.before[op].size()));
    for (std::int32_t op = 0; op < graph.n_ops(); ++op) {
      if (waits_[op] == 0) become_ready(op);
    }
  }

  Ops order() {
    while (!ready_.empty()) {
      if (falls_.empty() || memory_.live() + falls_.begin()->first > target_) {
        run(*ready_.begin());
        continue;
      }
      const std::int32_t op = falls_.begin()->second;
      auto [ops, height] = fall(op);
      forget(op);
      if (ops.empty()) continue;  // it is no fall any more: other ops have freed its storages
      if (memory_.live() + height > target_) {
        remember(op, height);
        continue;
      }
      for (const std::int32_t each : ops) run(each);
    }
    return order_;
  }

 private:
  // The ops of the fall that begins with `op`, and how far it rises before; no ops where it is none.
  std::pair<Ops, std::int64_t> fall(std::int32_t op) {
    const std::int64_t start = memory_.live();
    std::int64_t top = start;
    Ops ops, front{op};
    while (ops.size() < kLongestFall && !front.empty()) {
      const auto least = std::min_element(front.begin(), front.end(), [this](std::int32_t a, std::int32_t b) {
        return std::pair(graph_.made_bytes[a] - memory_.freed_by(a), a) < std::pair(graph_.made_bytes[b] - memory_.freed_by(b), b);
      });
      const std::int32_t next = *least;
      front.erase(least);
      top = std::max(top, memory_.running(next));
      memory_.run(next);
      ops.push_back(next);
      for (const std::int32_t other : graph_.after[next]) {
        if (--waits_[other] == 0) front.push_back(other);
      }
      if (memory_.live() <= start) break;
    }
    const bool falls = memory_.live() <= start;
    for (auto each = ops.rbegin(); each != ops.rend(); ++each) {
      for (const std::int32_t other : graph_.after[*each]) ++waits_[other];
      memory_.take_back(*each);
    }
    if (!falls) ops.clear();
    return {ops, top - start};
  }

  void become_ready(std::int32_t op) {
    ready_.insert(op);
    look(op);
  }

  void look(std::int32_t op) {
    forget(op);
    const auto [ops, height] = fall(op);
    if (!ops.empty()) remember(op, height);
  }

  void remember(std::int32_t op, std::int64_t height) {
    known_[op] = height;
    falls_.insert({height, op});
  }

  void forget(std::int32_t op) {
    if (known_[op] >= 0) falls_.erase({known_[op], op});
    known_[op] = -1;
  }

  void run(std::int32_t op) {
    ready_.erase(op);
    forget(op);
    memory_.run(op);
    order_.push_back(op);
    for (const std::int32_t other : graph_.after[op]) --waits_[other];  // update all before `become_ready`, which looks at successors
    for (const std::int32_t other : graph_.after[op]) {
      if (waits_[other] == 0) become_ready(other);
    }
    for (const std::int32_t s : graph_.uses[op]) {  // the last user of a storage may be a fall now
      if (memory_.users_left(s) != 1 || graph_.outlives[s]) continue;
      for (const std::int32_t user : graph_.users[s]) {
        if (ready_.contains(user)) look(user);
      }
    }
  }

  const Graph& graph_;
  Memory memory_;
  std::int64_t target_;
  std::vector<std::int32_t> waits_;  // by op: ops before it that have not run
  std::vector<std::int64_t> known_;  // by op: height of its fall in `falls_`, -1 where it is not there
  std::set<std::int32_t> ready_;
  std::set<std::pair<std::int64_t, std::int32_t>> falls_;
  Ops order_;
};

// One window around the first place where `order` is highest, ordered exactly; false where that lowers nothing.
bool lower(const Graph& graph, Ops& order) {
  const std::vector<std::int64_t> live = live_bytes(graph, order);
  const auto highest = static_cast<std::size_t>(std::max_element(live.begin(), live.end()) - live.begin());
  for (const std::size_t width : {std::size_t{12}, std::size_t{32}, std::size_t{64}}) {
    for (const std::size_t behind : {width / 2, width - 1, std::size_t{0}}) {
      const std::size_t first = highest - std::min(behind, highest), last = std::min(first + width, order.size());
      Memory memory(graph);
      for (std::size_t i = 0; i < first; ++i) memory.run(order[i]);
      const Ops better = best_order(graph, memory, std::span(order).subspan(first, last - first), kWindowStates);
      if (better.empty()) continue;
      std::int64_t peak = 0;
      for (const std::int32_t op : better) {
        peak = std::max(peak, memory.running(op));
        memory.run(op);
      }
      if (peak >= live[highest]) continue;
      std::copy(better.begin(), better.end(), order.begin() + static_cast<std::ptrdiff_t>(first));
      return true;
    }
  }
  return false;
}

}  // namespace

Ops low_peak_order(const Graph& graph) {
  Ops best(graph.n_ops());
  std::iota(best.begin(), best.end(), 0);
  if (best.empty()) return best;
  if (best.size() <= kFewOps) {
    const Ops exact = best_order(graph, Memory(graph), best, std::size_t{1} << (kFewOps + 1));
    return peak_of(graph, exact) < peak_of(graph, best) ? exact : best;
  }
  std::int64_t peak = peak_of(graph, best), target = peak;
  for (int i = 0; i < kTargets; ++i) {
    Ops order = Falls(graph, target).order();
    const std::int64_t reached = peak_of(graph, order);
    if (reached >= peak) break;
    best = std::move(order);
    peak = reached;
    target = peak - 1;
  }
  for (int i = 0; i < kWindows && lower(graph, best); ++i) continue;
  return best;
}

}  // namespace memtune::order
