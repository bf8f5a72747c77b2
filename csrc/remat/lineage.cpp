#include "remat/lineage.h"

#include <algorithm>

namespace memtune::remat {

namespace {

bool add_once(std::vector<Id>& ids, Id id) {
  if (std::find(ids.begin(), ids.end(), id) != ids.end()) return false;
  ids.push_back(id);
  return true;
}

}  // namespace

Id Lineage::add_tensor(Bytes bytes, Id base, Id op) {
  const Id tensor = static_cast<Id>(tensors.size());
  Id storage = base >= 0 ? tensors[base].storage : static_cast<Id>(storages.size());
  if (base < 0) {
    storages.emplace_back().bytes = bytes;
    class_of_.push_back(-1);
    closure_.push_back(-1);
    mark_.push_back(0);
    for (auto& way : spoilt_) way.push_back(0);
  }
  tensors.push_back({.storage = storage, .op = op, .view = base >= 0, .present = false, .refs = 0});
  storages[storage].tensors.push_back(tensor);
  return tensor;
}

void Lineage::link(Id op) {
  const Op& made = ops[op];
  std::vector<Id> outs;
  for (Id out : made.outs) add_once(outs, tensors[out].storage);
  // Edges to a storage that was there before may lead from what is spoilt to neighbourhoods that are not.
  if (std::any_of(made.outs.begin(), made.outs.end(), [&](Id out) { return tensors[out].view; }))
    for (auto& way : spoilt_) std::fill(way.begin(), way.end(), 0);
  for (Id out : outs) {
    storages[out].cost += made.cost;
    for (Id arg : made.args) {
      const Id in = tensors[arg].storage;
      if (in == out) continue;
      if (add_once(storages[out].parents, in)) ++storages[in].needed_by;
      add_once(storages[in].children, out);
    }
  }
}

void Lineage::evicted(Id storage) {
  Storage& gone = storages[storage];
  gone.evicted = true;
  Id mine = static_cast<Id>(classes_.size());
  classes_.push_back({mine, gone.cost});
  class_of_[storage] = mine;
  for (const auto* next : {&gone.parents, &gone.children}) {
    for (Id other : *next) {
      if (class_of_[other] < 0) continue;
      const Id theirs = find(class_of_[other]);
      if (theirs == mine) continue;
      classes_[theirs].cost += classes_[mine].cost;
      classes_[mine].parent = theirs;
      mine = theirs;
    }
  }
  for (auto& way : spoilt_) way[storage] = 0;
  spoil(storage, up);
  spoil(storage, down);
}

void Lineage::restored(Id storage) {
  Storage& back = storages[storage];
  if (!back.evicted) return;
  spoil(storage, up);
  spoil(storage, down);
  back.evicted = false;
  closure_[storage] = -1;
  classes_[find(class_of_[storage])].cost -= back.cost;
  class_of_[storage] = -1;
}

double Lineage::closure_cost(Id storage) {
  double& known = closure_[storage];
  if (known < 0) known = walk(storage, up) + walk(storage, down);
  return known;
}

double Lineage::ancestors_cost(Id storage) {
  double& known = closure_[storage];
  if (known < 0) known = walk(storage, up);
  return known;
}

double Lineage::classes_cost(Id storage) {
  double sum = 0;
  stack_.clear();
  for (const auto* next : {&storages[storage].parents, &storages[storage].children}) {
    for (Id other : *next) {
      if (class_of_[other] < 0) continue;
      const Id root = find(class_of_[other]);
      if (std::find(stack_.begin(), stack_.end(), root) != stack_.end()) continue;
      stack_.push_back(root);
      sum += classes_[root].cost;
    }
  }
  return sum;
}

double Lineage::walk(Id from, Way way) {
  const std::uint32_t mark = fresh_mark();
  double sum = 0;
  stack_.assign(1, from);
  mark_[from] = mark;
  while (!stack_.empty()) {
    const Id at = stack_.back();
    stack_.pop_back();
    steps += static_cast<std::int64_t>(next(at, way).size());
    for (Id other : next(at, way)) {
      if (mark_[other] == mark || !storages[other].evicted) continue;
      mark_[other] = mark;
      spoilt_[way == up ? down : up][other] = 0;  // `from` is reached from it, and counted now
      sum += storages[other].cost;
      stack_.push_back(other);
    }
  }
  return sum;
}

// The neighbourhoods that `from` belongs to must be counted again: those of what is reached through evicted storages.
void Lineage::spoil(Id from, Way way) {
  if (!keeps_walks || spoilt_[way][from]) return;
  stack_.assign(1, from);
  spoilt_[way][from] = 1;
  while (!stack_.empty()) {
    const Id at = stack_.back();
    stack_.pop_back();
    steps += static_cast<std::int64_t>(next(at, way).size());
    for (Id other : next(at, way)) {
      if (!storages[other].evicted) {
        closure_[other] = -1;
      } else if (!spoilt_[way][other]) {
        spoilt_[way][other] = 1;
        stack_.push_back(other);
      }
    }
  }
}

Id Lineage::find(Id node) {
  while (classes_[node].parent != node) {
    classes_[node].parent = classes_[classes_[node].parent].parent;
    node = classes_[node].parent;
  }
  return node;
}

std::uint32_t Lineage::fresh_mark() { return ++walk_; }

}  // namespace memtune::remat
