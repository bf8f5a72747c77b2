// Depth-first search for a layout within a capacity, over canonical layouts only.
#pragma once

#include <array>
#include <limits>
#include <vector>

#include "layout/problem.h"

namespace memtune::layout {

enum class Outcome { kFound, kNone, kStopped };

// Where the search decides next: at the section that comes first by ...
enum class Choice {
  kFewest,   // how few buffers could be next in it, then how little it may waste
  kForced,   // whether only one buffer could be next, then how low it is filled
  kTightest, // how low it is filled, then how little it may waste
  kRanked,   // how low it is filled, then the rank of the buffer
  kLearned,  // how few buffers could be next in it for each time that it was too full, then as kFewest
};

// Which buffer is placed next: one of those that could be next in the chosen section, the one of the lowest rank.
struct Strategy {
  Choice choice = Choice::kFewest;
  std::vector<std::int32_t> rank;  // by buffer
};

// Rules of the search. Of all layouts within the capacity it looks for the one with the smallest sum of offsets, which keeps them:
// Rule 1. A buffer is low if none that it meets and is not placed has a lower floor. Any low one may be decided: it is placed at its
//         floor, or (tried second) lifted, as it will be higher. So each section grows from the bottom, in whatever order of sections.
// Rule 2. Unplaced buffers of a section follow one another from their floors on; beyond the capacity there is no layout.
// Rule 3. A lifted buffer rests on one that it meets and is not placed.
// Rule 4. It is kept from where it rests now by one of those; and a low buffer that none of those can reach is not lifted.
// Rule 5. Parts that no unplaced buffer connects are solved separately.
// Rule 6. A failure depends only on the unplaced buffers and their floors, not on the buffers below them, so failures are cached.
class Search {
 public:
  explicit Search(const Instance& instance);

  // Looks for a layout no higher than `capacity` (in units), placing at most `node_limit` buffers.
  Outcome run(std::int64_t capacity, const Strategy& strategy, std::int64_t node_limit, const Clock& clock);

  Layout layout() const;                       // after kFound
  std::int64_t nodes() const { return nodes_; }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;

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
    std::int64_t floor, rest;
  };
  // Unplaced buffers of a section: their lowest floor, the next one (which may be as low), the lowest above the lowest, the sum of
  // their sizes, where they end at best (Rule 2), how many of the lowest are low (Rule 1) and the first of those.
  struct Section {
    std::int64_t floor = kNever, next = kNever, above = kNever, sum = 0, top = 0;
    std::int32_t n_low = 0, first = -1;
    bool all_low = true;
  };

  Outcome solve(Part part);
  Outcome solve_parts(Part part, std::int32_t placed);
  std::vector<Part> split(Part part, std::int32_t placed);
  std::int32_t number_parts(Part part, std::int32_t placed);
  bool survey(Part part);
  bool stack(std::int32_t buffer);
  bool lift(Part part);
  void raise(std::int32_t buffer, std::int64_t floor);
  bool reachable(std::int32_t buffer) const;
  std::int32_t choose() const;
  std::array<std::int64_t, 3> urgency(std::int32_t section) const;
  Key key(Part part) const;
  bool place(std::int32_t buffer);
  void take_back(std::int32_t buffer, std::size_t changes);

  const Instance& instance_;
  const std::vector<std::int64_t>& size_;
  const std::vector<std::array<Piece, 2>>& pieces_;
  std::vector<std::vector<std::int32_t>> neighbours_;  // buffers that share a section

  std::vector<std::int64_t> rest_;    // by buffer: the highest end of what it meets and is placed
  std::vector<std::int64_t> floor_;   // by buffer: as `rest_`, or lifted; of a placed buffer its offset
  std::vector<std::uint8_t> placed_;
  std::vector<std::int32_t> pool_;
  std::vector<Change> changes_;
  std::vector<Section> sections_;      // of the part that was surveyed last
  std::vector<std::int32_t> low_;      // its low buffers
  std::int64_t smallest_ = 0;          // its smallest size
  std::vector<std::int32_t> label_;    // by section: Rule 5
  std::vector<std::int64_t> too_full_; // by section: how often (Rule 2), plus 1; kept from run to run, since hard ones stay so
  std::vector<Key> failed_;            // a table of the last failures: they hold for all strategies
  std::int64_t capacity_ = -1, nodes_ = 0, node_limit_ = 0;
  const Strategy* strategy_ = nullptr;
  const Clock* clock_ = nullptr;
};

}  // namespace memtune::layout
