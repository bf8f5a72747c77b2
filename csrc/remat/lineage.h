// Data dependences of operators, tensors and storages, and the cost of recomputing evicted ones.
//
// Views of one storage are evicted together. The cost of a storage's neighbourhood is computed in one of three ways:
// - closure: exactly, by walking the evicted ancestors and descendants (e* of DTR); kept until something near it changes.
// - classes: union-find over evicted neighbours, with the summed cost; classes are never split (the approximation of DTR).
// - ancestors: evicted ancestors alone.
#pragma once

#include <cstdint>
#include <vector>

namespace memtune::remat {

using Bytes = std::int64_t;
using Id = std::int32_t;

struct Tensor {
  Id storage;
  Id op;         // that makes it, -1 for what cannot be made again
  bool view;     // looks into the storage of another tensor
  bool present;  // false: its op must run before it can be read
  std::int32_t refs;
  bool on_host = false;  // it was present when its storage was copied to the host
};

struct Storage {
  Bytes bytes = 0;
  double cost = 0;         // of all operators that make a tensor of it
  double last_access = 0;  // on the clock of costs
  std::int64_t order = 0;  // when it last became evictable
  std::int32_t pool_at = -1, locks = 0, refs = 0, replays = 0;
  std::int32_t needed_by = 0;  // storages made from it that may have to be made again
  bool resident = false, pinned = false, evicted = false;
  bool forgotten = false;  // nothing will ever ask for it
  bool on_host = false;    // evicted to the host, from where it is reloaded instead of recomputed
  bool cheap = false;  // for partitioned arenas
  std::vector<Id> tensors, parents, children;
};

struct Op {
  double cost;
  std::vector<Id> args, outs;  // tensors
  Id takes_over = -1;          // the argument in whose memory the first output is written
  Bytes scratch = 0;           // workspace, in addition to its outputs
  Bytes elements = 0;          // that it makes one by one, each of the same element of what it reads; 0: it does not run in parts
};

class Lineage {
 public:
  std::vector<Tensor> tensors;
  std::vector<Storage> storages;
  std::vector<Op> ops;
  std::int64_t steps = 0;   // storages that walks came to: the work of neighbourhoods
  bool keeps_walks = true;  // whether closure_cost or ancestors_cost will be asked, one of the two

  // A tensor with a storage of its own, or with `base` one that looks into the storage of `base`.
  Id add_tensor(Bytes bytes, Id base, Id op);
  // Counts the operator's cost to what it makes and links what it reads with what it makes.
  void link(Id op);

  void evicted(Id storage);
  void restored(Id storage);

  double closure_cost(Id storage);    // cost of evicted ancestors and descendants, transitively
  double ancestors_cost(Id storage);  // of evicted ancestors alone
  double classes_cost(Id storage);    // of the distinct classes next to it

 private:
  enum Way { up, down };  // to parents, to children
  const std::vector<Id>& next(Id storage, Way way) const { return way == up ? storages[storage].parents : storages[storage].children; }
  double walk(Id from, Way way);
  void spoil(Id from, Way way);
  Id find(Id node);
  std::uint32_t fresh_mark();

  struct Class {
    Id parent;
    double cost;
  };
  std::vector<Class> classes_;      // union-find
  std::vector<Id> class_of_;        // by storage, -1 for what is not evicted
  std::vector<double> closure_;     // by storage, negative where it must be counted again
  // By way and evicted storage: all that is reached from it through evicted storages must be counted again already.
  std::vector<char> spoilt_[2];
  std::vector<std::uint32_t> mark_; // by storage: seen in the walk of this number
  std::uint32_t walk_ = 0;
  std::vector<Id> stack_;
};

}  // namespace memtune::remat
