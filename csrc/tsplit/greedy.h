// TSPLIT's greedy planner (Nie et al., ICDE 2022, algorithm 2): at the peak the action with the least added time per byte freed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memtune::tsplit {

// Copies of all actions in one direction of the link, one row each, those of one action next to each other.
struct Link {
  std::span<const std::int32_t> action;
  std::span<const double> start_s;
  std::span<const double> end_s;   // by which it is to be over, as far as its own action tells
  std::span<const double> copy_s;  // how long it takes
};

// The actions for a step's timeline. An action's number is its row in `tensor`.
struct Problem {
  std::span<const std::int64_t> live_bytes;  // by moment, without any action
  std::span<const std::int32_t> tensor;      // by action
  std::span<const std::int32_t> number;      // by action: 1, 2, ... within its tensor
  std::span<const std::int32_t> part_of;     // by tensor: the tensor whose actions include this one, -1 for none
  std::span<const double> more_s;            // by action
  // What actions free, one row each, those of one action next to each other: `n_bytes` in the moments first to stop - 1.
  std::span<const std::int32_t> free_action, first, stop;
  std::span<const std::int64_t> n_bytes;
  Link out, back;
};

// The number of the action of each tensor, 0 for none: actions are taken until the peak is at most `budget_bytes` or none frees
// bytes at the peak. With `beyond`, bytes freed beyond the budget count as well. An action that another one has replaced is not
// taken again, so this ends.
// Throws std::invalid_argument for columns of different lengths and rows out of range.
std::vector<std::int32_t> greedy(const Problem& problem, std::int64_t budget_bytes, bool beyond);

}  // namespace memtune::tsplit
