// One optimizer step of all rank classes as tasks: which op runs when again, and what has to be finished before it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/step.h"

namespace memtune {

inline constexpr std::int32_t kNone = -1;

struct Task {
  std::int32_t op;
  std::int32_t repetition;
  std::int32_t waits = 0;           // unfinished tasks that come before it
  std::int32_t first_edge = kNone;  // of those that wait for it
  std::int32_t match = kNone;       // the group it starts together with
  // Filled in by the machine.
  double issued = 0, start = 0, stop = 0;
  std::int32_t last_waited = kNone;  // the one before it that finished last
  std::int32_t cause = kNone;        // the task that it started right after, kNone if it was the host
  std::int32_t last_partner = kNone;         // the last of the tasks of other classes that it waited for
  bool is_issued = false, is_done = false;
};

struct Edge {
  std::int32_t to, next;
};

// Tasks of different rank classes that start together.
struct Match {
  std::vector<std::int32_t> tasks;
  std::int32_t arrived = 0;
};

struct Graph {
  // Steps of all rank classes; the body runs `accumulate` times, the prologue in the first repetition, the rest in the last.
  Graph(std::span<const Step> steps, std::int64_t accumulate);

  std::vector<Task> tasks;                // class by class, each in program order
  std::vector<std::int32_t> first_task;   // (classes + 1,)
  std::vector<Edge> edges;
  std::vector<Match> matches;

 private:
  void add_class(const Step& step, std::int32_t accumulate);
  void match_classes(std::span<const Step> steps);
};

// Whether `op` belongs to this repetition.
inline bool runs_in(const Step& step, std::size_t op, std::int32_t repetition, std::int32_t accumulate) {
  const std::uint8_t phase = step.op_phase[op];
  if (phase == kPrologue) return repetition == 0;
  return (phase != kBoundary && phase != kOptimizer) || repetition == accumulate - 1;
}

// Storages that a transfer keeps alive: their last holder is an op outside the compute stream that uses or makes them. All other
// storages are freed by compute, which waits for their transfers first.
std::vector<std::uint8_t> kept_by_transfer(const Step& step, std::span<const std::int32_t> ends);

}  // namespace memtune
