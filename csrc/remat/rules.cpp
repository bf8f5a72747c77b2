#include <algorithm>
#include <cmath>
#include <limits>

#include "remat/cache.h"

namespace memtune::remat {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Bytes below which a storage is not worth looking at.
double small_below(const Cache& cache) {
  if (cache.rule.ignore_small <= 0 || cache.pool().empty()) return 0;
  double sum = 0;
  for (Id storage : cache.pool()) sum += static_cast<double>(cache.lineage.storages[storage].bytes);
  return cache.rule.ignore_small * sum / static_cast<double>(cache.pool().size());
}

}  // namespace

bool LowestScore::make_room(Cache& cache, Bytes bytes) {
  while (!cache.arena.fits(bytes)) {
    const Id victim = best(cache);
    if (victim < 0) return last_resort(cache, bytes);
    cache.give_up(victim);
  }
  return true;
}

// The last one wins a tie, in the order of becoming evictable; of those that cost nothing the first.
Id LowestScore::best(Cache& cache) {
  const auto& pool = cache.pool();
  const double small = small_below(cache);
  const auto root = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(pool.size())));
  for (const bool all : {false, true}) {  // a second time where nothing was found among the large ones of the sample
    Id found = -1;
    double lowest = kNever;
    for (std::size_t i = 0; i < pool.size();) {
      const Id storage = pool[i];
      i += cache.rule.sample && !all && root > 1 ? 1 + cache.random() % root : 1;
      const Storage& it = cache.lineage.storages[storage];
      if (!all && static_cast<double>(it.bytes) < small) continue;
      ++cache.counters.looked_at;
      const double mine = score(cache, storage);
      const bool later = found >= 0 && it.order > cache.lineage.storages[found].order;
      if (found < 0 || mine < lowest || (mine == lowest && later == (mine != 0))) {
        lowest = mine;
        found = storage;
      }
    }
    if (found >= 0) return found;
  }
  return -1;
}

double LowestScore::score(Cache& cache, Id storage) {
  if (cache.rule.random) return static_cast<double>(cache.random() >> 11);
  const Storage& it = cache.lineage.storages[storage];
  const double size = cache.rule.by_size ? static_cast<double>(it.bytes) : 1;
  const double stale = cache.rule.by_staleness ? cache.staleness(it) : 1;
  return size * stale == 0 ? kNever : cache.cost(storage) / (size * stale);
}

double AddressAware::score(Cache& cache, Id storage) {
  const Storage& it = cache.lineage.storages[storage];
  const RuleSettings& rule = cache.rule;
  constexpr double kMebibyte = 1 << 20;
  const double size = static_cast<double>(it.bytes + cache.arena.free_around(storage)) / kMebibyte;
  if (it.bytes == 0) return kNever;
  const double little = rule.epsilon * cache.mean_cost;
  return std::pow(cache.cost(storage) + little, rule.cost_power) * std::pow(rule.replay_base, it.replays) /
         (std::pow(size, rule.size_power) * std::pow(cache.staleness(it) + little, rule.time_power));
}

bool AddressAware::last_resort(Cache& cache, Bytes bytes) {
  ++cache.counters.compactions;
  cache.counters.moved_bytes += cache.arena.compact(cache.rule.compacts);
  return cache.arena.fits(bytes);
}

// Two pointers over the pieces in address order. A piece that must stay starts the window again behind it.
bool SlidingWindow::make_room(Cache& cache, Bytes bytes) {
  struct Seen {
    Id storage;
    Bytes bytes;
    double cost;
  };
  const Bytes wanted = cache.arena.rounded(bytes);
  std::vector<Seen> window;
  std::size_t left = 0, best_from = 0, best_to = 0;
  Bytes held = 0;
  double cost = 0, lowest = kNever;
  for (const auto& [offset, piece] : cache.arena.pieces()) {
    if (piece.storage >= 0 && !cache.evictable(piece.storage)) {
      left = window.size();
      held = 0, cost = 0;
      continue;
    }
    double mine = 0;
    if (piece.storage >= 0) {
      ++cache.counters.looked_at;
      const double stale = cache.rule.by_staleness ? cache.staleness(cache.lineage.storages[piece.storage]) : 1;
      mine = cache.cost(piece.storage) / std::max(stale, 1e-9);
    }
    window.push_back({piece.storage, piece.bytes, mine});
    held += piece.bytes, cost += mine;
    while (held >= wanted && left < window.size()) {
      if (cost < lowest) lowest = cost, best_from = left, best_to = window.size();
      held -= window[left].bytes, cost -= window[left].cost;
      ++left;
    }
  }
  if (lowest == kNever) return cache.rule.compacts && last_resort(cache, bytes);
  for (std::size_t i = best_from; i < best_to; ++i) {
    if (window[i].storage < 0) continue;
    cache.give_up(window[i].storage);
  }
  return cache.arena.fits(bytes);
}

// Locked pieces split the arena into runs that are all too short: evict the cheapest pieces until the free bytes suffice in total.
bool SlidingWindow::last_resort(Cache& cache, Bytes bytes) {
  const auto score = [&](Id storage) {
    const double stale = cache.rule.by_staleness ? cache.staleness(cache.lineage.storages[storage]) : 1;
    return cache.cost(storage) / std::max(stale, 1e-9);
  };
  while (cache.arena.free_bytes() < cache.arena.rounded(bytes)) {
    Id found = -1;
    double lowest = kNever;
    for (Id storage : cache.pool()) {
      const double mine = score(storage);
      if (mine < lowest) lowest = mine, found = storage;
    }
    if (found < 0) return false;
    cache.give_up(found);
  }
  ++cache.counters.compactions;
  cache.counters.moved_bytes += cache.arena.compact(true);
  return cache.arena.fits(bytes);
}

}  // namespace memtune::remat
