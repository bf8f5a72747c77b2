// Live bytes while the machine runs. Time is the host's: the allocator allocates and frees in the order of the host's calls, however
// far behind the device is. Only storages that a transfer keeps alive are freed when the transfer has finished; on a GPU not those of
// collectives, whose streams torch does not record, nor those of one side stream, whose pool reuses them in its order.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "simulator/graph.h"
#include "simulator/live.h"
#include "simulator/step.h"

namespace memtune {

class Memory {
 public:
  Memory(const Step& step, const AllocatorRules& rules, std::int64_t accumulate, bool host_computes);

  void issued(std::int32_t op, std::int32_t repetition);    // the host has come to `op`: what it makes is allocated
  void passed(std::int32_t op, std::int32_t repetition);    // the host goes on: what `op` was the last to hold is freed …
  void finished(std::int32_t op, std::int32_t repetition);  // … or later, when every transfer of it has finished

  const Footprint& footprint() const { return footprint_; }
  // Every allocation (storage + 1) and free (-(storage + 1)) in order, beginning with what is there at the start.
  std::vector<std::int32_t>&& take_stream() { return std::move(stream_); }

 private:
  void count_transfer(std::int32_t storage, std::int32_t op);
  void arrive(std::int32_t repetition);
  void allocate(std::int32_t storage);
  void free(std::int32_t storage);
  void release(std::int32_t storage, std::int32_t repetition);
  void look(std::int32_t op);

  const Step& step_;
  AllocatorRules rules_;
  std::int32_t accumulate_, repetition_ = -1;
  std::vector<std::int32_t> ends_;
  ByKey products_, dying_, uses_;
  std::vector<std::int32_t> there_, every_repetition_, with_repetition_;
  // Of what transfers keep: accesses by transfers in the first, in every and in the last repetition, and how many of them and of
  // the host are over, by repetition.
  std::vector<std::int32_t> slot_, holders_;
  std::vector<std::array<std::int32_t, 3>> transfers_;
  std::int32_t slots_ = 0;
  std::vector<std::uint8_t> saved_;
  std::array<std::int64_t, kTiers> now_{};
  std::array<std::int64_t, 2> pool_now_{};
  std::array<std::int64_t, kKinds + 1> kind_now_{};
  Footprint footprint_;
  std::vector<std::int32_t> stream_;
};

}  // namespace memtune
