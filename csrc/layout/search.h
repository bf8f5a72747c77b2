// Depth-first search for a layout within a capacity, over canonical layouts only.
#pragma once

#include <vector>

#include "layout/problem.h"

namespace memtune::layout {

enum class Outcome { kFound, kNone, kStopped };

// Rules of the search. Of all layouts within the capacity it looks for the one with the smallest sum of offsets, which keeps them:
// Rule 1. Buffers are placed in order of (offset, rank), each at its floor: the highest end of what it meets and is placed.
// Rule 2. Unplaced buffers of a section follow one another from their floors on; beyond the capacity there is no layout.
// Rule 3. A buffer that may no longer be placed at its floor (Rule 1) must be lifted by one that it meets and is not placed.
// Rule 4. No buffer is placed at or above where an unplaced one could end: that one could move below it.
// Rule 5. What no unplaced buffer connects is solved by itself.
// Rule 6. What is left decides alone: the same unplaced buffers at the same floors fail again, whatever lies below them.
class Search {
 public:
  // Buffers in the order of their rank; neighbours are buffers that share a section.
  Search(const Instance& instance, std::vector<std::int32_t> order);

  // Looks for a layout no higher than `capacity` (in units), placing at most `node_limit` buffers.
  Outcome run(std::int64_t capacity, std::int64_t node_limit, const Clock& clock);

  Layout layout() const;                       // after kFound
  std::int64_t nodes() const { return nodes_; }

 private:
  // Unplaced buffers as a range of `pool_`.
  struct Part {
    std::size_t begin, end;
  };
  // 128 bits of what is left of a part (Rule 6): two different ones that agree are not to be expected in any run.
  struct Key {
    std::uint64_t low = 0, high = 0;
    bool operator==(const Key&) const = default;
  };
  struct Change {
    std::int32_t buffer;
    std::int64_t floor;
  };

  Outcome solve(Part part, std::int64_t from, std::int32_t from_rank);
  Outcome solve_parts(Part part, std::int32_t placed);
  bool bound(Part part, std::int64_t from, std::int32_t from_rank, std::int64_t& lowest_end);
  Key key(Part part, std::int64_t from, std::int32_t from_rank) const;
  bool lift(std::int32_t buffer, std::int64_t from, std::int32_t from_rank);
  bool place(std::int32_t buffer);
  void take_back(std::int32_t buffer, std::size_t changes);
  std::vector<Part> split(Part part, std::int32_t placed);
  bool eligible(std::int32_t b, std::int64_t from, std::int32_t from_rank) const {
    return floor_[b] > from || (floor_[b] == from && b > from_rank);
  }

  const Instance& instance_;
  std::vector<std::int32_t> order_;
  std::vector<std::int64_t> size_;
  std::vector<std::array<Piece, 2>> pieces_;
  std::vector<std::vector<std::int32_t>> neighbours_;

  std::vector<std::int64_t> floor_;   // by rank: of a placed buffer its offset
  std::vector<std::int64_t> at_least_;  // by rank: as `floor_`, raised by Rules 1 and 3
  std::vector<std::uint8_t> placed_;
  std::vector<std::int32_t> pool_;
  std::vector<Change> changes_;
  std::vector<std::int64_t> stacked_;  // by section: Rule 2
  std::vector<std::int32_t> label_;    // by section: Rule 5
  std::vector<Key> failed_;            // a table of the last failures
  std::int64_t capacity_ = 0, nodes_ = 0, node_limit_ = 0;
  const Clock* clock_ = nullptr;
};

}  // namespace memtune::layout
