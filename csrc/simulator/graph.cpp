#include "simulator/graph.h"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace memtune {
namespace {

// For every key a list that can be emptied and filled again.
class Lists {
 public:
  explicit Lists(std::size_t keys) : first_(keys, kNone) {}

  void clear(std::int32_t key) { first_[key] = kNone; }
  void push(std::int32_t key, std::int32_t value) {
    links_.push_back({value, first_[key]});
    first_[key] = static_cast<std::int32_t>(links_.size()) - 1;
  }
  template <typename Visit>
  void each(std::int32_t key, Visit visit) const {
    for (std::int32_t at = first_[key]; at != kNone; at = links_[at].next) visit(links_[at].to);
  }

 private:
  std::vector<std::int32_t> first_;
  std::vector<Edge> links_;
};

// Adds the edges of one rank class, task by task in program order, so that no edge ever points backwards.
class Builder {
 public:
  Builder(const Step& step, Graph& graph)
      : step_(step), graph_(graph), uses_(step.use_op, step.n_ops()), products_(step.producer, step.n_ops()), ends_(step.ends()),
        dying_(ends_, step.n_ops()), kept_(kept_by_transfer(step, ends_)), writer_(step.n_storages(), kNone),
        readers_(step.n_storages()), movers_(step.n_storages()) {}

  void add(std::int32_t task, std::size_t op) {
    order_by_dependence(task, op);
    order_fetch(task, op);
    if (step_.computes(op)) {
      for (const std::int32_t transfer : freed_transfers_) edge(transfer, task);
      freed_transfers_.clear();
      last_compute_ = task;
    }
    // The compute stream waits for transfers of storages that are freed here.
    for (const std::int32_t storage : dying_[op]) {
      movers_.each(storage, [this](std::int32_t transfer) { freed_transfers_.push_back(transfer); });
      movers_.clear(storage);
    }
  }

 private:
  // Reads wait for the last write, writes for all reads as well; a storage made again is another one.
  void order_by_dependence(std::int32_t task, std::size_t op) {
    for (const std::int32_t use : uses_[op]) {
      const std::int32_t storage = step_.use_storage[use];
      if (step_.producer[storage] == static_cast<std::int32_t>(op)) continue;  // what the last repetition made is another one
      if (writer_[storage] != kNone) edge(writer_[storage], task);
      if (step_.use_mutates[use]) readers_.each(storage, [&](std::int32_t reader) { edge(reader, task); });
    }
    const bool moves = !step_.computes(op) && step_.op_resource[op] != kNothing;
    for (const std::int32_t storage : products_[op]) {
      readers_.clear(storage);
      movers_.clear(storage);
      writer_[storage] = task;
      if (moves && is_freed(storage)) movers_.push(storage, task);
    }
    for (const std::int32_t use : uses_[op]) {
      const std::int32_t storage = step_.use_storage[use];
      if (step_.use_mutates[use]) {
        writer_[storage] = task;
        readers_.clear(storage);
      } else {
        readers_.push(storage, task);
      }
      if (moves && is_freed(storage)) movers_.push(storage, task);
    }
  }

  bool is_freed(std::int32_t storage) const {
    return !kept_[storage] && static_cast<std::size_t>(ends_[storage]) < step_.n_ops();
  }

  // A fetch of depth d waits until compute has come to the place of the (d - 1)-th fetch before it on its stream.
  void order_fetch(std::int32_t task, std::size_t op) {
    const std::size_t depth = step_.op_prefetch[op];
    if (depth == 0) return;
    const bool own = step_.op_stream[op] == kOwnStream;
    std::vector<std::int32_t>& places = places_[own ? std::size_t{kStreams} + step_.op_resource[op] : step_.op_stream[op]];
    places.push_back(last_compute_);
    if (places.size() < depth) return;
    const std::int32_t place = places[places.size() - depth];
    if (place != kNone) edge(place, task);
  }

  void edge(std::int32_t from, std::int32_t to) {
    if (from == to) return;  // an op that names a storage twice
    graph_.edges.push_back({to, graph_.tasks[from].first_edge});
    graph_.tasks[from].first_edge = static_cast<std::int32_t>(graph_.edges.size()) - 1;
    ++graph_.tasks[to].waits;
  }

  const Step& step_;
  Graph& graph_;
  ByKey uses_, products_;
  std::vector<std::int32_t> ends_;
  ByKey dying_;
  std::vector<std::uint8_t> kept_;
  std::vector<std::int32_t> writer_;
  Lists readers_, movers_;
  std::vector<std::int32_t> freed_transfers_;
  std::int32_t last_compute_ = kNone;
  std::array<std::vector<std::int32_t>, std::size_t{kStreams} + kResources> places_;  // of fetches, by stream
};

}  // namespace

Graph::Graph(std::span<const Step> steps, std::int64_t accumulate) {
  if (accumulate < 1) throw std::invalid_argument("accumulate must be at least 1");
  for (const Step& step : steps) {
    first_task.push_back(static_cast<std::int32_t>(tasks.size()));
    add_class(step, static_cast<std::int32_t>(accumulate));
  }
  first_task.push_back(static_cast<std::int32_t>(tasks.size()));
  match_classes(steps);
}

void Graph::add_class(const Step& step, std::int32_t accumulate) {
  Builder builder(step, *this);
  for (std::int32_t repetition = 0; repetition < accumulate; ++repetition) {
    for (std::size_t op = 0; op < step.n_ops(); ++op) {
      if (!runs_in(step, op, repetition, accumulate)) continue;
      tasks.push_back({static_cast<std::int32_t>(op), repetition});
      builder.add(static_cast<std::int32_t>(tasks.size()) - 1, op);
    }
  }
}

void Graph::match_classes(std::span<const Step> steps) {
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> known;  // (number, repetition) → group
  for (std::size_t c = 0; c < steps.size(); ++c) {
    for (std::int32_t t = first_task[c]; t < first_task[c + 1]; ++t) {
      const std::int32_t number = steps[c].op_match[tasks[t].op];
      if (number == 0 || steps[c].op_resource[tasks[t].op] == kNothing) continue;
      const auto [at, fresh] = known.try_emplace({number, tasks[t].repetition}, static_cast<std::int32_t>(matches.size()));
      if (fresh) matches.emplace_back();
      std::vector<std::int32_t>& group = matches[at->second].tasks;
      if (!group.empty() && group.back() >= first_task[c]) {
        throw std::invalid_argument("op_match " + std::to_string(number) + " stands twice in rank class " + std::to_string(c));
      }
      group.push_back(t);
      tasks[t].match = at->second;
    }
  }
}

std::vector<std::uint8_t> kept_by_transfer(const Step& step, std::span<const std::int32_t> ends) {
  std::vector<std::uint8_t> kept(step.n_storages());
  const auto moves = [&step](std::int32_t op) { return step.op_resource[op] != kNothing && !step.computes(op); };
  for (std::size_t u = 0; u < step.use_op.size(); ++u) {
    const std::int32_t storage = step.use_storage[u];
    if (step.use_op[u] == ends[storage] && moves(step.use_op[u])) kept[storage] = 1;
  }
  for (std::size_t s = 0; s < kept.size(); ++s) {
    if (step.producer[s] >= 0 && step.producer[s] == ends[s] && moves(step.producer[s])) kept[s] = 1;
  }
  return kept;
}

}  // namespace memtune
