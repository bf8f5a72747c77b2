// The planned arena: one step's requests are watched, laid out on a circle, and from then on get base + offset.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "vmm/memory.h"
#include "vmm/steps.h"

namespace memtune::vmm {

struct PlanOptions {
  WatchOptions watch;
  double layout_s = 1.0;              // for the layout, on a core
  std::int64_t range_bytes = std::int64_t{1} << 38;  // addresses
};

// Rules:
// 1. A request is given its offset only if size and stream are those of the plan and nothing in use overlaps the place *now*. So
//    no order of requests, and no plan, can lead to an address that is in use: what does not fit is refused and counted.
// 2. Streams share no byte: what is freed on one may still be worked on when another asks.
// 3. A plan is changed between steps; what is in use stays where it is, and Rule 1 keeps the new plan off it.
// 4. Only what is freed within a step's length has a place; what lives longer is none of the arena's.
// 5. A plan that a step does not follow is suspended: the memory under it that nothing uses is given back, so that what is served
//    elsewhere does not come on top of it. Once steps ask for what is planned again, it is resumed; each time after twice as many.
class Planned {
 public:
  Planned(Memory& memory, PlanOptions options) : memory_(memory), options_(options), steps_(options.watch) {}
  ~Planned();
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  Address allocate(std::int64_t bytes, std::int32_t stream);  // 0: it is not in the plan, or there is none
  bool free(Address address);                                 // false: not in this arena

  // Observes the requests to plan: each one served, from this arena or another, and each free.
  void saw_allocation(Address address, std::int64_t bytes, std::int32_t stream) { steps_.saw_allocation(address, bytes, stream); }
  void saw_free(Address address) { steps_.saw_free(address); }

  // The end of a step. True: what was watched is complete, and `adopt` may be called.
  bool end_step();
  // Rule 5. Waits for the device.
  void suspend();
  bool may_resume() const { return plans_ > 0 && !active_ && followed_ >= resume_after_; }
  bool resume();  // false: there is not enough memory
  // Lays out what was watched and gets memory for it. False: there is not enough, and nothing is served from here.
  bool adopt();

  std::int64_t height_bytes() const { return height_; }
  std::int64_t bound_bytes() const { return bound_; }  // most bytes of the plan alive at once, streams apart
  void add_regions(std::vector<Region>& regions) const;
  std::int64_t planned_requests() const { return planned_; }
  std::int64_t served() const { return served_; }
  std::int64_t plans() const { return plans_; }
  const Steps& steps() const { return steps_; }

 private:
  bool is_free(std::int64_t offset, std::int64_t bytes) const;
  bool resize(std::int64_t height);
  void unmap_unused(std::int64_t from);

  Memory& memory_;
  PlanOptions options_;
  Steps steps_;
  Address base_ = 0;
  std::vector<std::optional<Chunk>> pages_;  // from the base on: what is mapped there
  std::vector<std::int64_t> offset_;   // of each request of the plan, -1: it has no place (Rule 4)
  std::map<std::int64_t, std::int64_t> live_;  // offset: end
  std::int64_t height_ = 0, bound_ = 0, served_ = 0, plans_ = 0, planned_ = 0;
  bool active_ = false;
  std::int64_t requests_ = 0, deviations_ = 0;         // of the current step
  std::int64_t followed_ = 0, resume_after_ = 1;       // steps in a row, while suspended
};

}  // namespace memtune::vmm
