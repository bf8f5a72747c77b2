#include "simulator/memory.h"

#include <algorithm>

namespace memtune {
namespace {

bool in_body(const Step& step, std::int32_t op) {
  const std::uint8_t phase = step.op_phase[op];
  return phase == kForward || phase == kRecompute || phase == kBackward;
}

constexpr std::size_t kSeveral = kQueues, kNoStream = kQueues + 1;

// By storage the stream of all ops that make or use it.
std::vector<std::size_t> only_streams(const Step& step) {
  std::vector<std::size_t> found(step.n_storages(), kNoStream);
  const auto touch = [&](std::size_t storage, std::int32_t op) {
    if (op < 0 || step.op_resource[op] == kNothing) return;
    const std::size_t stream = step.queue(op);
    found[storage] = found[storage] == kNoStream || found[storage] == stream ? stream : kSeveral;
  };
  for (std::size_t s = 0; s < found.size(); ++s) touch(s, step.producer[s]);
  for (std::size_t u = 0; u < step.use_op.size(); ++u) touch(step.use_storage[u], step.use_op[u]);
  return found;
}

// Device storages that the allocator of a GPU has back as soon as the host drops them, although the op that used them last is on a
// side stream. Of collectives: process groups hold tensors until the host waits, and record no stream
// (TORCH_NCCL_AVOID_RECORD_STREAMS, the default since torch 2.8). Of one stream alone: they come from that stream's own pool.
std::vector<bool> freed_by_host(const Step& step, const std::vector<std::int32_t>& ends) {
  std::vector<bool> found(step.n_storages());
  const std::vector<std::size_t> streams = only_streams(step);
  for (std::size_t s = 0; s < found.size(); ++s) {
    if (step.tier[s] != kDevice || ends[s] < 0 || static_cast<std::size_t>(ends[s]) >= step.n_ops()) continue;
    const std::uint8_t last = step.op_resource[ends[s]];
    found[s] = last == kIntraLink || last == kInterLink || (streams[s] < kQueues && step.producer[s] >= 0);
  }
  return found;
}

}  // namespace

Memory::Memory(const Step& step, const AllocatorRules& rules, std::int64_t accumulate, bool host_computes)
    : step_(step), rules_(rules), accumulate_(static_cast<std::int32_t>(accumulate)), ends_(step.ends()),
      products_(step.producer, step.n_ops()), dying_(ends_, step.n_ops()), uses_(step.use_op, step.n_ops()),
      slot_(step.n_storages(), kNone), transfers_(step.n_storages()), saved_(step.n_storages()) {
  const auto n = static_cast<std::int32_t>(step.n_ops());
  std::vector<std::uint8_t> kept = kept_by_transfer(step, ends_);
  if (!host_computes) {
    const std::vector<bool> dropped = freed_by_host(step, ends_);
    for (std::size_t s = 0; s < kept.size(); ++s) kept[s] &= !dropped[s];
  }
  for (std::size_t s = 0; s < kept.size(); ++s) {
    const auto storage = static_cast<std::int32_t>(s);
    const std::int32_t made_by = step.producer[s], end = ends_[s];
    if (kept[s]) slot_[s] = slots_++;
    if (made_by < 0 && end >= 0) {
      there_.push_back(storage);
      if (end < n && in_body(step, end)) every_repetition_.push_back(storage);
    }
    // A storage that the body makes and only boundary or optimizer frees is freed before the next repetition makes it again.
    const bool again = made_by >= 0 && in_body(step, made_by);
    if (again && (end >= n || !in_body(step, end))) with_repetition_.push_back(storage);
    if (made_by >= 0) count_transfer(storage, made_by);
  }
  for (std::size_t u = 0; u < step.use_op.size(); ++u) {
    count_transfer(step.use_storage[u], step.use_op[u]);
  }
  holders_.assign(static_cast<std::size_t>(slots_) * accumulate_, 0);
  for (const std::int32_t storage : step.save_storage) saved_[storage] = 1;
}

void Memory::count_transfer(std::int32_t storage, std::int32_t op) {
  if (slot_[storage] == kNone || step_.op_resource[op] == kNothing || step_.computes(op)) return;
  const std::uint8_t phase = step_.op_phase[op];
  ++transfers_[storage][phase == kPrologue ? 0 : phase == kBoundary || phase == kOptimizer ? 2 : 1];
}

void Memory::arrive(std::int32_t repetition) {
  if (repetition_ < 0) {
    for (const std::int32_t storage : there_) allocate(storage);
  } else {
    for (const std::int32_t storage : with_repetition_) free(storage);
    for (const std::int32_t storage : every_repetition_) allocate(storage);
  }
  repetition_ = repetition;
}

void Memory::issued(std::int32_t op, std::int32_t repetition) {
  if (repetition != repetition_) arrive(repetition);
  for (const std::int32_t storage : products_[op]) allocate(storage);
  look(op);
}

void Memory::passed(std::int32_t op, std::int32_t repetition) {
  for (const std::int32_t storage : dying_[op]) release(storage, repetition);
}

void Memory::finished(std::int32_t op, std::int32_t repetition) {
  if (step_.computes(op) || step_.op_resource[op] == kNothing) return;
  for (const std::int32_t use : uses_[op]) {
    if (slot_[step_.use_storage[use]] != kNone) release(step_.use_storage[use], repetition);
  }
  for (const std::int32_t storage : products_[op]) {
    if (slot_[storage] != kNone) release(storage, repetition);
  }
}

// One holder less; the last one frees: the host, or a transfer that finishes later.
void Memory::release(std::int32_t storage, std::int32_t repetition) {
  const std::int32_t made_by = step_.producer[storage];
  const bool made_once = made_by >= 0 && !in_body(step_, made_by);
  if (made_once && in_body(step_, ends_[storage]) && repetition < accumulate_ - 1) return;
  if (slot_[storage] != kNone) {
    std::int32_t& gone = holders_[static_cast<std::size_t>(repetition) * slots_ + slot_[storage]];
    const auto& [first, every, last] = transfers_[storage];
    if (++gone <= every + (repetition == 0 ? first : 0) + (repetition == accumulate_ - 1 ? last : 0)) return;
  }
  free(storage);
}

void Memory::allocate(std::int32_t storage) {
  stream_.push_back(storage + 1);
  const std::uint8_t tier = step_.tier[storage];
  const std::int64_t bytes = tier == kDevice ? rules_.rounded(step_.bytes[storage]) : step_.bytes[storage];
  now_[tier] += bytes;
  if (tier != kDevice) return;
  pool_now_[bytes > rules_.small_bytes] += bytes;
  kind_now_[step_.kind[storage] == kTemporary && saved_[storage] ? std::size_t{kKinds} : step_.kind[storage]] += bytes;
}

void Memory::free(std::int32_t storage) {
  stream_.push_back(-storage - 1);
  const std::uint8_t tier = step_.tier[storage];
  const std::int64_t bytes = tier == kDevice ? rules_.rounded(step_.bytes[storage]) : step_.bytes[storage];
  now_[tier] -= bytes;
  if (tier != kDevice) return;
  pool_now_[bytes > rules_.small_bytes] -= bytes;
  kind_now_[step_.kind[storage] == kTemporary && saved_[storage] ? std::size_t{kKinds} : step_.kind[storage]] -= bytes;
}

void Memory::look(std::int32_t op) {
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    if (now_[tier] <= footprint_.peak_bytes[tier] && footprint_.peak_op[tier] >= 0) continue;
    footprint_.peak_bytes[tier] = now_[tier];
    footprint_.peak_op[tier] = op;
    if (tier == kDevice) footprint_.bytes_by_kind = kind_now_;
  }
  for (std::size_t pool = 0; pool < pool_now_.size(); ++pool) {
    footprint_.pool_peak_bytes[pool] = std::max(footprint_.pool_peak_bytes[pool], pool_now_[pool]);
  }
}

}  // namespace memtune
