// New positions of rows when a pass inserts and removes ops, by counting sort.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memtune {

// Original rows (0 … n-1) and inserted rows (n, n+1, …) in their new order.
struct Order {
  std::vector<std::int32_t> rows;      // remaining rows in their new order
  std::vector<std::int32_t> position;  // by row: new position, -1 for removed rows; one more entry, which is -1
  std::vector<std::int32_t> before;    // by row: new position; for a removed row that of the last remaining row before it
  std::vector<std::int32_t> next;      // by row: new position; for a removed row that of the next row, at most the last one
};

// Insertion i goes after row `anchor[i]` if `after[i]`, else before it. Insertions at one place keep their order; rows inserted after
// a row precede rows inserted before the next one. Anchors lie in [-1, n]; n is the end.
// Throws std::invalid_argument for other anchors.
Order order_rows(std::span<const std::uint8_t> removed, std::span<const std::int32_t> anchor, std::span<const std::uint8_t> after);

// out[i] = column[rows[i]], where column is `old` followed by `added`. Throws std::invalid_argument for a row outside of it.
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
