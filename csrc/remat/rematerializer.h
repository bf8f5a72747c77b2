// Simulates operators under a byte budget: recomputes missing inputs before each one, and makes room for its outputs.
//
// It only simulates; `journal` has the actions for the caller, who holds the real memory. Chains of missing inputs are walked with
// a stack of frames, not by recursion.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "remat/cache.h"

namespace memtune::remat {

enum class Release { ignore, evict, banish };  // what happens when the program drops its last reference

struct Settings {
  ArenaSettings arena;
  RuleSettings rule;
  Release release = Release::evict;
  bool keep_replayed = true;   // recomputed tensors without references stay in the pool; false: only until the call that needed them has run
  bool forget = false;         // storages that can never be needed again are freed and leave all neighbourhoods
  bool in_place = false;       // an operator that overwrites an argument may use its place
  int parts = 1;               // more: an operator by elements and makers of its missing arguments may run together, part by part
  double cost_limit = 0;       // ends the run where the costs of all runs exceed it, or are known to do so at its end; 0: no limit
  std::int64_t work_limit = 0; // the same for candidates looked at and steps of walks, which bounds the time of a simulation
};

struct Out {
  Bytes bytes = 0;
  Id base = -1;  // tensor whose storage it looks into
  bool cheap = false;
};

// over_write: the replay that follows may use the place. along: the operator runs again in the parts of the run or replay that
// follows, and what it makes never exists whole. swap and reload: a storage that is evicted to the host, and is reloaded.
enum class Act : std::int32_t { run, replay, evict, over_write, along, swap, reload };

struct Entry {
  Act act;
  Id id;  // operator, or storage for evict, swap and reload
};

struct Infeasible : std::runtime_error {
  Infeasible(Bytes wanted_bytes, Bytes held_bytes)
      : std::runtime_error("nothing is left to evict"), wanted(wanted_bytes), held(held_bytes) {}
  Bytes wanted, held;  // of the request that failed, and of storages that cannot be evicted
};

struct Thrashing : std::runtime_error {
  Thrashing() : std::runtime_error("the limit of costs or of work is exceeded") {}
};

class Rematerializer {
 public:
  explicit Rematerializer(const Settings& settings);

  Id constant(Bytes bytes);  // a tensor that is always resident
  // Runs an operator for the first time; its outputs follow each other in the returned order, with one reference each.
  // `scratch`: what it takes while it runs again; room for its first run is the caller's to make.
  // `elements`: see Op.
  std::vector<Id> call(double cost, std::vector<Id> args, const std::vector<Out>& outs, Id takes_over, bool again, Bytes scratch = 0,
                       Bytes elements = 0);
  void retain(Id tensor);
  void release(Id tensor);
  void require(Id tensor);  // recomputes it if needed, and pins it
  void bring(Id tensor);    // recomputes it if needed
  void make_room(Bytes bytes);
  void settle();  // makes all referenced tensors resident at once
  std::int64_t work() const { return cache.counters.looked_at + cache.lineage.steps; }

  Cache cache;
  std::vector<Entry> journal;
  double first_cost = 0, replay_cost = 0;
  double all_first_cost = 0;  // of all first runs to come, where that is known: a run over its limit of costs ends at once
  std::int64_t replays = 0, calls = 0;
  Bytes peak = 0;  // with what was asked for by `make_room` and as scratch

 private:
  struct Frame {
    Id op;
    std::size_t next = 0;
    std::vector<Id> args;  // of the operator, and of those that run along with it
    std::vector<char> locked;
    std::vector<Id> along;  // operators that run again in its parts, ascending
    bool first;
    bool whole = false;  // in parts it does not fit
  };

  void run(Id op, bool first);
  bool reload(Id tensor);
  void enter(Id op, bool first);
  void take_arg(Frame& frame, Id arg);
  bool takes_along(Frame& frame);
  bool in_parts(const Frame& frame, Id op, std::vector<Id>& along) const;
  Bytes part_bytes(Id op) const;
  void execute(const Frame& frame);
  bool overwrites(const Op& op, bool first) const;
  void place(const Op& op, bool over, Bytes scratch);
  void leave(const Frame& frame);
  void drop(Id storage);
  void try_banish();
  void forget(Id storage);
  void needs_no_parents(Id storage);
  void note_evictions();

  Settings settings_;
  std::vector<Frame> frames_;
  std::vector<Id> dead_again_;  // recomputed without a reference
  std::vector<Id> to_banish_;
};

}  // namespace memtune::remat
