#include "order/graph.h"

#include <algorithm>
#include <stdexcept>

namespace memtune::order {

namespace {

void each_once(std::vector<std::vector<std::int32_t>>& rows) {
  for (auto& row : rows) {
    std::sort(row.begin(), row.end());
    row.erase(std::unique(row.begin(), row.end()), row.end());
  }
}

void must_be(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

Graph make_graph(std::int32_t n_ops, std::span<const std::int64_t> bytes, std::span<const std::int32_t> producer,
                 std::span<const std::uint8_t> outlives, std::span<const std::int32_t> use_op, std::span<const std::int32_t> use_storage,
                 std::span<const std::int32_t> first, std::span<const std::int32_t> then) {
  const auto n_storages = static_cast<std::int32_t>(bytes.size());
  must_be(n_ops >= 0 && producer.size() == bytes.size() && outlives.size() == bytes.size(), "columns of storages differ in length");
  must_be(use_op.size() == use_storage.size() && first.size() == then.size(), "columns of pairs differ in length");
  Graph graph{{bytes.begin(), bytes.end()}, {outlives.begin(), outlives.end()}, {}, {}, {}, {}, {}};
  graph.users.resize(bytes.size());
  graph.uses.resize(n_ops);
  graph.made_bytes.resize(n_ops);
  graph.before.resize(n_ops);
  graph.after.resize(n_ops);
  for (std::int32_t s = 0; s < n_storages; ++s) {
    must_be(bytes[s] >= 0, "a storage has fewer than no bytes");
    must_be(producer[s] >= -1 && producer[s] < n_ops, "a storage is made by no op");
    if (producer[s] < 0) {
      graph.start_bytes += bytes[s];
    } else {
      graph.made_bytes[producer[s]] += bytes[s];
      graph.uses[producer[s]].push_back(s);
    }
  }
  for (std::size_t i = 0; i < use_op.size(); ++i) {
    must_be(use_op[i] >= 0 && use_op[i] < n_ops && use_storage[i] >= 0 && use_storage[i] < n_storages, "a use of no op or storage");
    const std::int32_t maker = producer[use_storage[i]];
    must_be(maker <= use_op[i], "a storage is used before it is made");
    graph.uses[use_op[i]].push_back(use_storage[i]);
    if (maker >= 0 && maker != use_op[i]) graph.before[use_op[i]].push_back(maker);
  }
  for (std::size_t i = 0; i < first.size(); ++i) {
    must_be(first[i] >= 0 && first[i] < then[i] && then[i] < n_ops, "what comes first is later in program order");
    graph.before[then[i]].push_back(first[i]);
  }
  each_once(graph.uses);
  each_once(graph.before);
  for (std::int32_t op = 0; op < n_ops; ++op) {
    for (const std::int32_t s : graph.uses[op]) graph.users[s].push_back(op);
    for (const std::int32_t other : graph.before[op]) graph.after[other].push_back(op);
  }
  return graph;
}

Memory::Memory(const Graph& graph) : graph_(graph), live_(graph.start_bytes) {
  for (const auto& users : graph.users) left_.push_back(static_cast<std::int32_t>(users.size()));
}

std::int64_t Memory::freed_by(std::int32_t op) const {
  std::int64_t freed = 0;
  for (const std::int32_t s : graph_.uses[op]) {
    if (left_[s] == 1 && !graph_.outlives[s]) freed += graph_.bytes[s];
  }
  return freed;
}

void Memory::run(std::int32_t op) {
  live_ += graph_.made_bytes[op] - freed_by(op);
  for (const std::int32_t s : graph_.uses[op]) --left_[s];
}

void Memory::take_back(std::int32_t op) {
  for (const std::int32_t s : graph_.uses[op]) ++left_[s];
  live_ -= graph_.made_bytes[op] - freed_by(op);
}

std::vector<std::int64_t> live_bytes(const Graph& graph, std::span<const std::int32_t> order) {
  Memory memory(graph);
  std::vector<std::int64_t> live;
  for (const std::int32_t op : order) {
    live.push_back(memory.running(op));
    memory.run(op);
  }
  return live;
}

}  // namespace memtune::order
