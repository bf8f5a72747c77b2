// Where rows go when a pass inserts and removes ops: positions by counting, no comparison sort.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memtune {

// The rows that were there (0 … n-1) and the inserted ones (n, n+1, …) in their new order.
struct Order {
  std::vector<std::int32_t> rows;      // the rows that stay, in their new order
  std::vector<std::int32_t> position;  // by row, then one more: new position, -1 for what is removed and for the last entry
  std::vector<std::int32_t> before;    // by row: new position, for what is removed that of the last row before it that stays
  std::vector<std::int32_t> next;      // by row: new position, for what is removed that of the next row, at most the last one
};

// Insertion i goes after row `anchor[i]` where `after[i]`, else before it; insertions at one place keep their order, and what
// goes after a row comes before what goes before the next one. Anchors lie in [-1, n]; n is the end.
// Throws std::invalid_argument where one does not.
Order order_rows(std::span<const std::uint8_t> removed, std::span<const std::int32_t> anchor, std::span<const std::uint8_t> after);

// out[i] = column[rows[i]] of the rows that were there followed by the inserted ones. Throws std::invalid_argument for a row in
// neither.
template <typename T>
void take_rows(std::span<const std::int32_t> rows, std::span<const T> old, std::span<const T> added, T* out);

struct Uses {
  std::vector<std::int32_t> op, storage;
  std::vector<std::uint8_t> mutates;
};

// The uses sorted by op; uses of one op keep their order. Throws std::invalid_argument for an op outside [0, n_ops).
Uses sort_uses(std::span<const std::int32_t> op, std::span<const std::int32_t> storage, std::span<const std::uint8_t> mutates,
               std::int32_t n_ops);

}  // namespace memtune
