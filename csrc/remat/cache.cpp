#include "remat/cache.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace memtune::remat {

namespace {

std::unique_ptr<Rule> rule_of(RuleKind kind) {
  switch (kind) {
    case RuleKind::megtaichi: return std::make_unique<AddressAware>();
    case RuleKind::coop: return std::make_unique<SlidingWindow>();
    default: return std::make_unique<LowestScore>();
  }
}

}  // namespace

Cache::Cache(const ArenaSettings& arena_settings, const RuleSettings& rule_settings)
    : arena(arena_settings), rule(rule_settings), random(rule_settings.seed), chooser_(rule_of(rule_settings.kind)) {
  lineage.keeps_walks = rule.neighbours == Neighbours::closure || rule.neighbours == Neighbours::ancestors;
}

Cache::~Cache() = default;

bool Cache::make_room(Bytes bytes) {
  if (arena.fits(bytes)) return true;
  ++counters.searches;
  const double share = static_cast<double>(arena.free_bytes()) / static_cast<double>(std::max<Bytes>(arena.settings().capacity, 1));
  counters.fragmentation_sum += share;
  counters.fragmentation_max = std::max(counters.fragmentation_max, share);
  return chooser_->make_room(*this, bytes);
}

bool Cache::admit(Id storage, Bytes bytes) {
  return make_room(bytes) && arena.place(storage, bytes, rule.groups > 1 && lineage.storages[std::max(storage, 0)].cheap);
}

void Cache::resident(Id storage) {
  Storage& back = lineage.storages[storage];
  lineage.restored(storage);
  back.resident = true;
  refresh(storage);
}

void Cache::leave(Id storage, bool to_host) {
  Storage& gone = lineage.storages[storage];
  gone.resident = false;
  refresh(storage);
  arena.remove(storage);
  for (Id tensor : gone.tensors) lineage.tensors[tensor].on_host = std::exchange(lineage.tensors[tensor].present, false) && to_host;
  evicted_now.push_back({storage, to_host});
}

void Cache::evict(Id storage) {
  leave(storage, false);
  lineage.evicted(storage);
}

// A storage on the host is in no neighbourhood of evicted ones: what is recomputed from it does not run its makers again.
void Cache::give_up(Id storage) {
  ++counters.evictions;
  Storage& gone = lineage.storages[storage];
  // Without a reference only recomputations could ask for it, so a copy would be made in vain.
  if (!rule.swaps || gone.refs == 0 || exposed_cost(gone) + from_host_cost(gone) >= recompute_cost(storage)) return evict(storage);
  const double waited = exposed_cost(gone);
  link_free_ = std::max(link_free_, gone.last_access) + to_host_cost(gone);
  clock += waited;
  exposed += waited;
  ++counters.swaps;
  counters.swapped_bytes += gone.bytes;
  gone.on_host = true;
  leave(storage, true);
}

bool Cache::reload(Id storage) {
  Storage& back = lineage.storages[storage];
  if (!admit(storage, back.bytes)) return false;
  const double copied = from_host_cost(back);
  clock += copied;
  exposed += copied;
  back.on_host = false;
  resident(storage);
  for (Id tensor : back.tensors) lineage.tensors[tensor].present = lineage.tensors[tensor].on_host;
  return true;
}

// The copy begins after the last use, as soon as the link is free: the storage does not change until it is evicted.
double Cache::exposed_cost(const Storage& storage) const {
  const double seconds = to_host_cost(storage);
  return rule.hides_copies ? std::max(std::max(link_free_, storage.last_access) + seconds - clock, 0.0) : seconds;
}

void Cache::take_over(Id from, Id to) {
  Storage& gone = lineage.storages[from];
  gone.resident = false;
  refresh(from);
  arena.take_over(from, to);
  for (Id tensor : gone.tensors) lineage.tensors[tensor].present = false;
  lineage.evicted(from);
}

void Cache::lock(Id storage) {
  if (++lineage.storages[storage].locks == 1) refresh(storage);
}

void Cache::unlock(Id storage) {
  if (--lineage.storages[storage].locks == 0) refresh(storage);
}

void Cache::pin(Id storage) {
  lineage.storages[storage].pinned = true;
  refresh(storage);
}

bool Cache::evictable(Id storage) const {
  if (static_cast<std::size_t>(storage) >= lineage.storages.size()) return false;  // the second copy of one that is there
  const Storage& it = lineage.storages[storage];
  return it.resident && !it.pinned && it.locks == 0;
}

void Cache::refresh(Id storage) {
  Storage& it = lineage.storages[storage];
  if (evictable(storage)) {
    if (it.pool_at >= 0) return;
    it.order = ++orders_;
    it.pool_at = static_cast<std::int32_t>(pool_.size());
    pool_.push_back(storage);
  } else if (it.pool_at >= 0) {
    lineage.storages[pool_.back()].pool_at = it.pool_at;
    pool_[it.pool_at] = pool_.back();
    pool_.pop_back();
    it.pool_at = -1;
  }
}

double Cache::staleness(const Storage& storage) const {
  if (!rule.foresight || next_uses.empty()) return clock - storage.last_access;
  double next = std::numeric_limits<double>::infinity();
  for (Id tensor : storage.tensors) {
    if (static_cast<std::size_t>(tensor) >= next_uses.size() || next_uses[tensor].empty()) continue;
    next = std::min(next, next_uses[tensor].back());
  }
  return next == std::numeric_limits<double>::infinity() ? 1e30 : std::max(next - now, 0.0);
}

double Cache::cost(Id storage) {
  const double again = recompute_cost(storage);
  const Storage& it = lineage.storages[storage];
  return rule.swaps && it.refs > 0 ? std::min(again, exposed_cost(it) + from_host_cost(it)) : again;
}

double Cache::recompute_cost(Id storage) {
  const double own = lineage.storages[storage].cost;
  switch (rule.neighbours) {
    case Neighbours::nothing: return 1;
    case Neighbours::own: return own;
    case Neighbours::classes: return own + lineage.classes_cost(storage);
    case Neighbours::closure: return own + lineage.closure_cost(storage);
    default: return own + lineage.ancestors_cost(storage);
  }
}

}  // namespace memtune::remat
