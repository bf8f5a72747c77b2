// Resident storages under a byte budget: places, locks, eviction candidates, and three eviction rules.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "remat/arena.h"
#include "remat/lineage.h"

namespace memtune::remat {

enum class Neighbours { nothing, own, classes, closure, ancestors };  // what a storage's cost counts; `nothing`: it is 1
enum class RuleKind { dtr, megtaichi, coop };

struct RuleSettings {
  RuleKind kind = RuleKind::dtr;
  Neighbours neighbours = Neighbours::classes;
  bool by_size = true, by_staleness = true;
  bool random = false;         // every score is a draw
  bool sample = false;         // look at every k-th candidate only, k drawn from 1 … sqrt(n)
  double ignore_small = 0;     // storages below this fraction of the mean evictable size are not looked at
  double cost_power = 1, size_power = 1, time_power = 1, replay_base = 1;  // megtaichi
  double epsilon = 0;          // megtaichi: added to cost and staleness, in mean costs of an operator
  int groups = 1;              // coop: 2 keeps cheap outputs at the right end
  bool compacts = false;       // bytes decide in the end: where no hole is large enough, all moves together (`Arena::compact`)
  bool foresight = false;      // staleness is the time to the next use, where accesses were recorded before
  std::uint64_t seed = 0;
  bool swaps = false;          // an evicted storage is copied to the host where that costs less than to recompute it
  double to_host_per_byte = 0, from_host_per_byte = 0, copy_cost = 0;  // costs, the last one of any copy
  bool hides_copies = true;    // operators run during copies to the host
};

struct Counters {
  std::int64_t evictions = 0, released = 0, searches = 0, looked_at = 0, compactions = 0, swaps = 0;
  double fragmentation_sum = 0, fragmentation_max = 0;  // free share of the arena when a search starts
  Bytes moved_bytes = 0, swapped_bytes = 0;
};

class Rule;

class Cache {
 public:
  Cache(const ArenaSettings& arena, const RuleSettings& rule);
  ~Cache();

  Lineage lineage;
  Arena arena;
  RuleSettings rule;
  double clock = 1;
  Counters counters;
  struct Gone {
    Id storage;
    bool to_host;
  };
  std::vector<Gone> evicted_now;  // storages that went since this was last cleared, in order
  std::vector<std::vector<double>> next_uses;  // by tensor, when it is used, descending; what is over is popped
  double mean_cost = 0;                        // of the operators so far
  double now = 0;                              // the time that `next_uses` speaks of
  double exposed = 0;                          // cost of copies that no operator hid, since it was last taken

  // Makes room and gives `storage` a place; false if no candidate is left to evict.
  bool admit(Id storage, Bytes bytes);
  bool make_room(Bytes bytes);
  void resident(Id storage);  // its bytes are there and its first tensor can be read
  void evict(Id storage);     // frees it; its tensors must be made again
  void give_up(Id storage);   // evicts it, or swaps it where that costs less
  bool reload(Id storage);    // copies it back from the host; false if there is no room
  void lock(Id storage);
  void unlock(Id storage);
  void pin(Id storage);
  void take_over(Id from, Id to);
  void drop(Id key) { arena.remove(key); }
  double staleness(const Storage& storage) const;
  double cost(Id storage);  // of having it again: recomputed, as the rule counts it, or swapped
  bool evictable(Id storage) const;
  const std::vector<Id>& pool() const { return pool_; }
  std::mt19937_64 random;

 private:
  void refresh(Id storage);
  void leave(Id storage, bool to_host);
  double recompute_cost(Id storage);  // own and of its neighbourhood
  double to_host_cost(const Storage& it) const { return rule.copy_cost + rule.to_host_per_byte * static_cast<double>(it.bytes); }
  double from_host_cost(const Storage& it) const { return rule.copy_cost + rule.from_host_per_byte * static_cast<double>(it.bytes); }
  double exposed_cost(const Storage& storage) const;  // of the copy to the host, as far as it must be waited for
  double link_free_ = 0;  // when the link to the host has done its copies, on the clock of costs
  std::vector<Id> pool_;
  std::int64_t orders_ = 0;
  std::unique_ptr<Rule> chooser_;
};

// Chooses the storages to evict.
class Rule {
 public:
  virtual ~Rule() = default;
  virtual bool make_room(Cache& cache, Bytes bytes) = 0;
};

// Evicts the storage of the lowest score until the request fits.
class LowestScore : public Rule {
 public:
  bool make_room(Cache& cache, Bytes bytes) override;

 protected:
  virtual double score(Cache& cache, Id storage);
  virtual bool last_resort(Cache&, Bytes) { return false; }

 private:
  Id best(Cache& cache);
};

// MegEngine's score, which likes what leaves a large hole; moves everything together when that alone helps.
class AddressAware : public LowestScore {
 protected:
  double score(Cache& cache, Id storage) override;
  bool last_resort(Cache& cache, Bytes bytes) override;
};

// Evicts the run of neighbouring pieces of the lowest summed score that holds the request.
class SlidingWindow : public Rule {
 public:
  bool make_room(Cache& cache, Bytes bytes) override;

 private:
  bool last_resort(Cache& cache, Bytes bytes);
};

}  // namespace memtune::remat
