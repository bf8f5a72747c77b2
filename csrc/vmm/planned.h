// The planned arena: one step's requests are watched, laid out on a circle, and from then on get base + offset.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "vmm/memory.h"

namespace memtune::vmm {

struct PlanOptions {
  std::int64_t skip_steps = 1;        // before one is watched: the first makes the optimizer state
  std::int64_t window = 64;           // how far from its place in the plan a request of the same size is still recognised
  std::int64_t replan_after = 64;     // requests off the plan after which another step is watched; doubles each time
  double layout_s = 1.0;              // for the layout, on a core
  std::int64_t range_bytes = std::int64_t{1} << 38;  // addresses
};

// Rules:
// 1. A request is given its offset only if size and stream are those of the plan and nothing in use overlaps the place *now*. So
//    no order of requests, and no plan, can lead to an address that is in use: what does not fit is refused and counted.
// 2. Streams share no byte: what is freed on one may still be worked on when another asks.
// 3. A plan is changed between steps; what is in use stays where it is, and Rule 1 keeps the new plan off it.
// 4. Only what is freed within a step's length has a place; what lives longer is none of the arena's.
class Planned {
 public:
  Planned(Memory& memory, PlanOptions options) : memory_(memory), options_(options) {}
  ~Planned();
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  Address allocate(std::int64_t bytes, std::int32_t stream);  // 0: it is not in the plan, or there is none
  bool free(Address address);                                 // false: not in this arena

  // What is to be planned: every request that was served, here or elsewhere, and every free.
  void saw_allocation(Address address, std::int64_t bytes, std::int32_t stream);
  void saw_free(Address address);

  // The end of a step. True: what was watched is complete, and `adopt` may be called.
  bool end_step();
  // Lays out what was watched and gets memory for it. False: there is not enough, and the plan stays as it was.
  bool adopt();

  std::int64_t height_bytes() const { return height_; }
  std::int64_t bound_bytes() const { return bound_; }  // most bytes of the plan alive at once, streams apart
  std::int64_t planned_requests() const;
  std::int64_t served() const { return served_; }
  std::int64_t deviations() const { return deviations_; }
  std::int64_t plans() const { return plans_; }
  const std::string& first_deviation() const { return first_deviation_; }

 private:
  enum class Watching { kNothing, kSteps, kFrees };
  struct Slot {
    std::int64_t bytes, offset;  // -1: it has no place (Rule 4)
    bool used = false;
  };
  struct Sequence {
    std::vector<Slot> slots;
    std::size_t cursor = 0;
  };
  struct Row {
    std::int64_t bytes, start, end = -1;
    std::int32_t stream;
  };

  Slot* find(Sequence& sequence, std::int64_t bytes);
  bool is_free(std::int64_t offset, std::int64_t bytes) const;
  void deviated(std::int64_t bytes, std::int32_t stream);
  bool resize(std::int64_t height);

  Memory& memory_;
  PlanOptions options_;
  Address base_ = 0;
  std::vector<Chunk> chunks_;  // mapped from the base on
  std::map<std::int32_t, Sequence> sequences_;
  std::map<std::int64_t, std::int64_t> live_;  // offset: end
  std::int64_t height_ = 0, bound_ = 0, served_ = 0, deviations_ = 0, since_plan_ = 0, plans_ = 0, steps_ = 0;
  std::string first_deviation_;

  Watching watching_ = Watching::kSteps;
  std::vector<Row> rows_;
  std::unordered_map<Address, std::size_t> open_;  // rows without an end
  std::int64_t clock_ = 0, period_ = 0;
};

}  // namespace memtune::vmm
