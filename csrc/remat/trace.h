// A whole run from columns: what the program did, replayed under a budget.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "remat/rematerializer.h"

namespace memtune::remat {

enum class Event : std::int32_t { constant, call, release, retain, require };

// Tensors are numbered in the order in which constants and calls make them.
struct Trace {
  std::span<const std::int64_t> tensor_bytes;    // (t,)
  std::span<const std::int32_t> tensor_base;     // (t,) tensor whose storage it looks into, -1 for one of its own
  std::span<const std::uint8_t> tensor_cheap;    // (t,)
  std::span<const double> op_cost;               // (n,)
  std::span<const std::int32_t> op_args_at;      // (n + 1,) where the arguments of each op begin
  std::span<const std::int32_t> op_args;         // tensors
  std::span<const std::int32_t> op_outs;         // (n,) how many tensors it makes
  std::span<const std::int32_t> op_takes_over;   // (n,) tensor that it overwrites, -1
  std::span<const std::uint8_t> op_again;        // (n,) 0 where it must not run a second time
  std::span<const std::int64_t> op_elements;     // (n,) that it makes one by one of those that it reads, 0 for all others
  std::span<const std::int32_t> event_kind;      // (k,) Event
  std::span<const std::int32_t> event_id;        // (k,) op or tensor
};

enum class Outcome : std::int32_t { done, infeasible, thrashing };

struct Report {
  Outcome outcome = Outcome::done;
  double first_cost = 0, replay_cost = 0;
  Bytes peak_bytes = 0, wanted_bytes = 0, held_bytes = 0;
  std::int64_t replays = 0, events_done = 0, work = 0;
  Counters counters;
  std::vector<Entry> journal;
};

// `settle`: at the end all that is still referenced is brought back, together.
Report run_trace(const Trace& trace, const Settings& settings, bool settle, bool keep_journal);

}  // namespace memtune::remat
