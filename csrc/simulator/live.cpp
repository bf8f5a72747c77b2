#include "simulator/live.h"

#include <algorithm>
#include <vector>

namespace memtune {
namespace {

// Largest prefix sum of `delta` before its last element, and where it is first reached.
std::int64_t peak(const std::vector<std::int64_t>& delta, std::int32_t* at = nullptr) {
  std::int64_t now = 0, most = 0;
  std::int32_t first = delta.size() > 1 ? 0 : -1;
  for (std::size_t op = 0; op + 1 < delta.size(); ++op) {
    now += delta[op];
    if (now > most) {
      most = now;
      first = static_cast<std::int32_t>(op);
    }
  }
  if (at != nullptr) *at = first;
  return most;
}

void count_kinds(const Step& step, const std::vector<std::int32_t>& end, const AllocatorRules& rules, Live& out) {
  const std::int32_t op = out.peak_op[kDevice];
  std::vector<std::uint8_t> saved(step.n_storages());
  for (const std::int32_t storage : step.save_storage) saved[storage] = 1;
  for (std::size_t s = 0; s < step.n_storages(); ++s) {
    if (step.tier[s] != kDevice || step.producer[s] > op || end[s] < op) continue;
    const bool activation = step.kind[s] == kTemporary && saved[s];
    const std::size_t kind = activation ? std::size_t{kKinds} : step.kind[s];
    out.bytes_by_kind[kind] += rules.rounded(step.bytes[s]);
  }
}

void sum_resources(const Step& step, Live& out) {
  for (std::size_t op = 0; op < step.n_ops(); ++op) {
    out.busy_s[step.op_resource[op]][step.op_phase[op]] += step.op_s[op];
    out.busy_s[kHostIssue][step.op_phase[op]] += step.op_issue_s[op];
  }
}

}  // namespace

Live live(const Step& step, const AllocatorRules& rules) {
  Live out;
  const auto n = static_cast<std::int32_t>(step.n_ops());
  if (n == 0) return out;
  const std::vector<std::int32_t> end = step.ends();
  // Bytes that appear or vanish before each op: one column per tier, then the device's two pools.
  std::array<std::vector<std::int64_t>, kTiers + 2> delta;
  for (auto& column : delta) column.assign(n + 1, 0);
  auto& small = delta[kTiers];
  auto& large = delta[kTiers + 1];
  for (std::size_t s = 0; s < step.n_storages(); ++s) {
    const std::int32_t start = std::max(step.producer[s], 0), stop = std::min(end[s], n - 1) + 1;
    const bool device = step.tier[s] == kDevice;
    const std::int64_t bytes = device ? rules.rounded(step.bytes[s]) : step.bytes[s];
    delta[step.tier[s]][start] += bytes;
    delta[step.tier[s]][stop] -= bytes;
    if (!device) continue;
    auto& pool = bytes <= rules.small_bytes ? small : large;
    pool[start] += bytes;
    pool[stop] -= bytes;
  }
  for (std::size_t tier = 0; tier < kTiers; ++tier) out.peak_bytes[tier] = peak(delta[tier], &out.peak_op[tier]);
  out.pool_peak_bytes = {peak(small), peak(large)};
  count_kinds(step, end, rules, out);
  sum_resources(step, out);
  return out;
}

}  // namespace memtune
