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
  }
  tensors.push_back({.storage = storage, .op = op, .view = base >= 0, .present = false, .refs = 0});
  storages[storage].tensors.push_back(tensor);
  return tensor;
}

void Lineage::link(Id op) {
  const Op& made = ops[op];
  std::vector<Id> outs;
  for (Id out : made.outs) add_once(outs, tensors[out].storage);
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
  spoil(storage, &Storage::parents);
  spoil(storage, &Storage::children);
}

void Lineage::restored(Id storage) {
  Storage& back = storages[storage];
  if (!back.evicted) return;
  spoil(storage, &Storage::parents);
  spoil(storage, &Storage::children);
  back.evicted = false;
  closure_[storage] = -1;
  classes_[find(class_of_[storage])].cost -= back.cost;
  class_of_[storage] = -1;
}

double Lineage::closure_cost(Id storage) {
  double& known = closure_[storage];
  if (known < 0) known = walk(storage, &Storage::parents) + walk(storage, &Storage::children);
  return known;
}

double Lineage::ancestors_cost(Id storage) {
  double& known = closure_[storage];
  if (known < 0) known = walk(storage, &Storage::parents);
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

double Lineage::walk(Id from, std::vector<Id> Storage::* next) {
  const std::uint32_t mark = fresh_mark();
  double sum = 0;
  stack_.assign(1, from);
  mark_[from] = mark;
  while (!stack_.empty()) {
    const Id at = stack_.back();
    stack_.pop_back();
    steps += static_cast<std::int64_t>((storages[at].*next).size());
    for (Id other : storages[at].*next) {
      if (mark_[other] == mark || !storages[other].evicted) continue;
      mark_[other] = mark;
      sum += storages[other].cost;
      stack_.push_back(other);
    }
  }
  return sum;
}

// The neighbourhoods that `from` belongs to must be counted again: those of what is reached through evicted storages.
void Lineage::spoil(Id from, std::vector<Id> Storage::* next) {
  if (!keeps_walks) return;
  const std::uint32_t mark = fresh_mark();
  stack_.assign(1, from);
  mark_[from] = mark;
  while (!stack_.empty()) {
    const Id at = stack_.back();
    stack_.pop_back();
    steps += static_cast<std::int64_t>((storages[at].*next).size());
    for (Id other : storages[at].*next) {
      if (mark_[other] == mark) continue;
      mark_[other] = mark;
      if (storages[other].evicted) stack_.push_back(other);
      else closure_[other] = -1;
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
