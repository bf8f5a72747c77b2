#include "edit/order.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace memtune {
namespace {

// Places 2(a + 1) and 2(a + 1) + 1: insertions before row a, and after it.
std::size_t place(std::int32_t anchor, bool after) { return 2 * static_cast<std::size_t>(anchor + 1) + (after ? 1 : 0); }

}  // namespace

Order order_rows(std::span<const std::uint8_t> removed, std::span<const std::int32_t> anchor, std::span<const std::uint8_t> after) {
  const auto n = static_cast<std::int32_t>(removed.size()), added = static_cast<std::int32_t>(anchor.size());
  if (after.size() != anchor.size()) throw std::invalid_argument("anchor and after must have the same length");
  std::vector<std::int32_t> first(place(n, true) + 2);  // by place: where its insertions begin
  for (std::int32_t i = 0; i < added; ++i) {
    if (anchor[i] < -1 || anchor[i] > n) throw std::invalid_argument("anchor must lie in [-1, " + std::to_string(n) + "]");
    ++first[place(anchor[i], after[i]) + 1];
  }
  for (std::size_t p = 1; p < first.size(); ++p) first[p] += first[p - 1];
  std::vector<std::int32_t> sorted(added), filled(first);
  for (std::int32_t i = 0; i < added; ++i) sorted[filled[place(anchor[i], after[i])]++] = n + i;

  Order out;
  out.rows.reserve(n + added);
  out.position.assign(n + added + 1, -1);
  out.before.resize(n + added);
  out.next.resize(n + added);
  const auto put = [&out](std::int32_t row, bool remains) {
    const auto at = static_cast<std::int32_t>(out.rows.size());
    out.next[row] = at;
    out.before[row] = remains ? at : at - 1;
    if (!remains) return;
    out.position[row] = at;
    out.rows.push_back(row);
  };
  for (std::int32_t row = -1; row <= n; ++row) {
    for (std::int32_t i = first[place(row, false)]; i < first[place(row, true)]; ++i) put(sorted[i], true);
    if (row >= 0 && row < n) put(row, !removed[row]);
    for (std::int32_t i = first[place(row, true)]; i < first[place(row, true) + 1]; ++i) put(sorted[i], true);
  }
  const auto last = static_cast<std::int32_t>(out.rows.size()) - 1;
  for (std::int32_t& position : out.next) position = std::min(position, last);
  return out;
}

template <typename T>
void take_rows(std::span<const std::int32_t> rows, std::span<const T> old, std::span<const T> added, T* out) {
  const std::size_t n = old.size();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::size_t>(rows[i]);  // a negative one becomes too large
    if (row >= n + added.size()) throw std::invalid_argument("a row lies outside the column");
    out[i] = row < n ? old[row] : added[row - n];
  }
}

template void take_rows(std::span<const std::int32_t>, std::span<const std::uint8_t>, std::span<const std::uint8_t>, std::uint8_t*);
template void take_rows(std::span<const std::int32_t>, std::span<const std::uint32_t>, std::span<const std::uint32_t>, std::uint32_t*);
template void take_rows(std::span<const std::int32_t>, std::span<const std::uint64_t>, std::span<const std::uint64_t>, std::uint64_t*);

Uses sort_uses(std::span<const std::int32_t> op, std::span<const std::int32_t> storage, std::span<const std::uint8_t> mutates,
               std::int32_t n_ops) {
  if (storage.size() != op.size() || mutates.size() != op.size()) throw std::invalid_argument("uses must have the same length");
  std::vector<std::int32_t> next(static_cast<std::size_t>(n_ops) + 1);
  for (const std::int32_t each : op) {
    if (each < 0 || each >= n_ops) throw std::invalid_argument("uses.op must lie in [0, " + std::to_string(n_ops) + ")");
    ++next[each + 1];
  }
  for (std::size_t p = 1; p < next.size(); ++p) next[p] += next[p - 1];
  Uses out{std::vector<std::int32_t>(op.size()), std::vector<std::int32_t>(op.size()), std::vector<std::uint8_t>(op.size())};
  for (std::size_t u = 0; u < op.size(); ++u) {
    const std::int32_t to = next[op[u]]++;
    out.op[to] = op[u];
    out.storage[to] = storage[u];
    out.mutates[to] = mutates[u];
  }
  return out;
}

}  // namespace memtune
