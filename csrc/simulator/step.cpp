#include "simulator/step.h"

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

void Step::check() const {
  const std::size_t n = n_ops(), m = n_storages();
  check_length("op_resource", op_resource.size(), n);
  check_length("op_s", op_s.size(), n);
  check_length("op_issue_s", op_issue_s.size(), n);
  check_length("tier", tier.size(), m);
  check_length("kind", kind.size(), m);
  check_length("producer", producer.size(), m);
  check_length("held_until", held_until.size(), m);
  check_length("use_storage", use_storage.size(), use_op.size());
  check_length("use_mutates", use_mutates.size(), use_op.size());
  check_length("save_until", save_until.size(), save_storage.size());
  const auto ops = static_cast<std::int64_t>(n), storages = static_cast<std::int64_t>(m);
  check_range("op_phase", op_phase, 0, kPhases);
  check_range("op_resource", op_resource, 0, kHostIssue);
  check_range("tier", tier, 0, kTiers);
  check_range("kind", kind, 0, kKinds);
  check_range("producer", producer, -1, ops);
  check_range("use_op", use_op, 0, ops);
  check_range("use_storage", use_storage, 0, storages);
  check_range("save_storage", save_storage, 0, storages);
  for (std::size_t u = 1; u < use_op.size(); ++u) {
    if (use_op[u - 1] > use_op[u]) throw std::invalid_argument("use_op must be sorted; it falls at row " + std::to_string(u));
  }
}

}  // namespace memtune
