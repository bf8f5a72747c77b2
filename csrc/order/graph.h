// Orders of the ops of a graph, and the bytes that are live under each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memtune::order {

using Ops = std::vector<std::int32_t>;

// Ops are numbered in program order, so predecessors have smaller numbers. A storage is live from its producer (-1: from the start)
// until the last op that uses it has run, or to the end if it outlives the graph.
struct Graph {
  std::vector<std::int64_t> bytes;                // by storage
  std::vector<std::uint8_t> outlives;                // by storage
  std::vector<std::vector<std::int32_t>> users;   // by storage: ops that use it, its producer among them, ascending
  std::vector<std::vector<std::int32_t>> uses;    // by op: storages that it uses or makes, each once
  std::vector<std::int64_t> made_bytes;           // by op
  std::vector<std::vector<std::int32_t>> before;  // by op: ops that it must come after, each once
  std::vector<std::vector<std::int32_t>> after;   // by op: ops that must come after it, each once
  std::int64_t start_bytes = 0;                   // live before the first op

  std::int32_t n_ops() const { return static_cast<std::int32_t>(uses.size()); }
};

// Takes pairs of op and used storage (with or without producers), and pairs of ops of which the first must run first. Users of a storage
// run after its producer, which needs no pair. Throws std::invalid_argument for a number out of range and for a pair against program
// order.
Graph make_graph(std::int32_t n_ops, std::span<const std::int64_t> bytes, std::span<const std::int32_t> producer,
                 std::span<const std::uint8_t> outlives, std::span<const std::int32_t> use_op, std::span<const std::int32_t> use_storage,
                 std::span<const std::int32_t> first, std::span<const std::int32_t> then);

// Live bytes while ops run one after the other; `take_back` undoes the last `run`.
class Memory {
 public:
  explicit Memory(const Graph& graph);
  std::int64_t live() const { return live_; }                                              // between two ops
  std::int64_t running(std::int32_t op) const { return live_ + graph_.made_bytes[op]; }    // while `op` runs
  std::int32_t users_left(std::int32_t storage) const { return left_[storage]; }
  std::int64_t freed_by(std::int32_t op) const;  // bytes that go when `op` has run, were it the next
  void run(std::int32_t op);
  void take_back(std::int32_t op);

 private:
  const Graph& graph_;
  std::vector<std::int32_t> left_;  // by storage: users that have not run
  std::int64_t live_;
};

// Bytes live while each op of `order` runs, by place in the order.
std::vector<std::int64_t> live_bytes(const Graph& graph, std::span<const std::int32_t> order);

// The order of `window`, a run of at most 64 ops of an order whose earlier ops `memory` has run, under which the most live bytes are
// least. Exact; empty where more than `most_states` sets of ops had to be looked at.
Ops best_order(const Graph& graph, const Memory& memory, std::span<const std::int32_t> window, std::size_t most_states);

// An order with a low peak, never above that of program order: optimal for graphs of a few ops; for others program order in which ops
// that free more than they make are moved up, and windows around the peak are ordered exactly.
Ops low_peak_order(const Graph& graph);

}  // namespace memtune::order
