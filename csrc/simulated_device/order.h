// Which op has happened before which: a vector clock per stream, and the last uses of every byte.
//
// Two ops on different streams are ordered if a chain of events, waits and host synchronisation leads from one to the other. Two
// uses of the same bytes, one of them a write, that are not ordered are a race: it is found whatever the speed of the streams.
// (Vector clocks: Mattern, Virtual Time and Global States of Distributed Systems, 1989; a use per byte: FastTrack, Flanagan and
// Freund, PLDI 2009.)
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace memtune::sim {

inline constexpr int kHost = 0;  // the timeline of the host; all its threads are one

using Tick = std::uint64_t;
using Clock = std::vector<Tick>;  // by timeline: its last op that has happened before

struct Range {
  std::uintptr_t begin, end;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

struct Use {
  int timeline = -1;  // -1: none
  Tick tick = 0;
  const std::string* op = nullptr;  // its name
  bool writes = false;
};

struct Race {
  Range range;  // of the later use
  Use earlier, later;
};

class Order {
 public:
  explicit Order(int timelines) : clocks_(timelines, Clock(timelines, 0)) {}

  // Begins the next op of `timeline`. The host issues it, so it is later than all that the host has waited for.
  Tick issue(int timeline);
  // Orders all later ops of `timeline` after those that `clock` covers.
  void wait(int timeline, const Clock& clock);
  const Clock& clock(int timeline) const { return clocks_[timeline]; }
  // The clock of an op that the host would issue on `timeline` now.
  Clock next_clock(int timeline) const;

  static bool covers(const Clock& clock, const Use& use) { return clock[use.timeline] >= use.tick; }

  // Records that the present op of `use.timeline` uses `range`; appends the races with earlier uses to `races`.
  void use(Range range, const Use& use, std::vector<Race>& races);
  // The recorded uses of `range` that `clock` does not cover.
  std::vector<Use> uncovered(Range range, const Clock& clock) const;
  void forget(Range range);

 private:
  struct Cell {
    std::uintptr_t end;
    Use write;
    std::vector<Use> reads;  // since the write, the last of each timeline
  };
  using Cells = std::map<std::uintptr_t, Cell>;  // by the first byte; they do not overlap

  void split(std::uintptr_t at);

  std::vector<Clock> clocks_;
  Cells cells_;
};

}  // namespace memtune::sim
