// Dynamic storage allocation: buffers with lifetimes get offsets, so that buffers alive at once do not overlap and the height is low.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace memtune::layout {

// Rows of a problem. A buffer lives in [start, end) and takes its size, rounded up to its alignment, at a multiple of it.
// On a circle time runs from 0 to `period` and starts again: a lifetime may end after the period, by up to its start, and then
// goes on at 0. On a line `period` is 0.
struct Problem {
  std::span<const std::int64_t> start, end, size, alignment;
  std::int64_t period = 0;
};

// Consecutive sections, `lo` to `hi` excluded.
struct Piece {
  std::int32_t lo = 0, hi = 0;
};

// The problem in sections: the moments at which no other moment has the same buffers and more. Two buffers meet exactly if they
// share a section, so a problem on a circle differs from one on a line only in that some buffers consist of two pieces.
struct Instance {
  std::int32_t n_sections = 0;
  std::vector<std::int64_t> size;       // rounded up to the alignment
  std::vector<std::int64_t> alignment;  // all 1 where all were the same
  std::int64_t unit = 1;                // sizes are in units of so many bytes: what all sizes and alignments are multiples of
  bool plain = true;                    // all alignments are 1
  std::vector<std::int64_t> duration;        // length of the lifetime
  std::vector<std::array<Piece, 2>> pieces;  // the second one is empty but for lifetimes that wrap

  std::int32_t n() const { return static_cast<std::int32_t>(size.size()); }
  std::int64_t align(std::int64_t offset, std::int32_t buffer) const {
    if (plain) return offset;
    const std::int64_t a = alignment[buffer];
    return (offset + a - 1) / a * a;
  }
};

// Checks and compresses a problem. std::invalid_argument names the first row that is no buffer.
Instance compile(const Problem& problem);

// Bytes (in units) alive at once in every section.
std::vector<std::int64_t> section_totals(const Instance& instance);

// Offsets in units of the instance, and the highest end of any buffer.
struct Layout {
  std::vector<std::int64_t> offset;
  std::int64_t height = 0;
};

// Seconds of this thread on a core: a limit in them means the same on a busy machine.
class Clock {
 public:
  explicit Clock(double limit_s);
  double spent_s() const;
  bool over() const { return spent_s() >= limit_s_; }
  double left_s() const { return limit_s_ - spent_s(); }

 private:
  double began_s_, limit_s_;
};

}  // namespace memtune::layout
