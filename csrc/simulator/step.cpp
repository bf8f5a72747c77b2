#include "simulator/step.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace memtune {
namespace {

void check_length(const char* column, std::size_t length, std::size_t expected) {
  if (length != expected) {
    throw std::invalid_argument(std::string(column) + " has " + std::to_string(length) + " rows instead of " + std::to_string(expected));
  }
}

template <typename T>
void check_range(const char* column, std::span<const T> values, std::int64_t low, std::int64_t high) {
  // One branch per column, not per row: the loop vectorises.
  bool inside = true;
  for (const T value : values) inside &= value >= low && value < high;
  if (!inside) {
    throw std::invalid_argument(std::string(column) + " must lie in [" + std::to_string(low) + ", " + std::to_string(high) + ")");
  }
}

}  // namespace

std::vector<std::int32_t> Step::ends() const {
  std::vector<std::int32_t> end(n_storages());
  for (std::size_t s = 0; s < end.size(); ++s) end[s] = std::max(held_until[s], producer[s]);
  for (std::size_t u = 0; u < use_op.size(); ++u) {
    std::int32_t& last = end[use_storage[u]];
    last = std::max(last, use_op[u] - (use_mutates[u] == kHandsOver));
  }
  for (std::size_t v = 0; v < save_storage.size(); ++v) {
    std::int32_t& last = end[save_storage[v]];
    last = std::max(last, save_until[v]);
  }
  return end;
}

ByKey::ByKey(std::span<const std::int32_t> keys, std::size_t n) : first(n + 1), rows(keys.size()) {
  const auto inside = [n](std::int32_t key) { return key >= 0 && static_cast<std::size_t>(key) < n; };
  for (const std::int32_t key : keys) {
    if (inside(key)) ++first[key + 1];
  }
  for (std::size_t k = 0; k < n; ++k) first[k + 1] += first[k];
  std::vector<std::int32_t> next(first.begin(), first.end());
  for (std::size_t row = 0; row < keys.size(); ++row) {
    if (inside(keys[row])) rows[next[keys[row]]++] = static_cast<std::int32_t>(row);
  }
}

void Step::check() const {
  const std::size_t n = n_ops(), m = n_storages();
  check_length("ops.resource", op_resource.size(), n);
  check_length("op_s", op_s.size(), n);
  check_length("op_issue_s", op_issue_s.size(), n);
  check_length("storages.tier", tier.size(), m);
  check_length("storages.kind", kind.size(), m);
  check_length("storages.producer", producer.size(), m);
  check_length("storages.held_until", held_until.size(), m);
  check_length("uses.storage", use_storage.size(), use_op.size());
  check_length("uses.mode", use_mutates.size(), use_op.size());
  check_length("saves.held_until", save_until.size(), save_storage.size());
  check_length("ops.stream", op_stream.size(), n);
  check_length("ops.prefetch", op_prefetch.size(), n);
  check_length("ops.match", op_match.size(), n);
  const auto ops = static_cast<std::int64_t>(n), storages = static_cast<std::int64_t>(m);
  check_range("ops.phase", op_phase, 0, kPhases);
  check_range("ops.resource", op_resource, 0, kHostIssue);
  check_range("storages.tier", tier, 0, kTiers);
  check_range("storages.kind", kind, 0, kKinds);
  check_range("storages.producer", producer, -1, ops);
  check_range("uses.op", use_op, 0, ops);
  check_range("uses.storage", use_storage, 0, storages);
  check_range("saves.storage", save_storage, 0, storages);
  check_range("ops.stream", op_stream, 0, kStreams);
  check_range("ops.match", op_match, 0, std::int64_t{1} << 31);
  for (std::size_t u = 1; u < use_op.size(); ++u) {
    if (use_op[u - 1] > use_op[u]) throw std::invalid_argument("uses.op must be sorted; it decreases at row " + std::to_string(u));
  }
}

}  // namespace memtune
