// The events level: when every op of one optimizer step starts and finishes, on every class of ranks.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "simulator/live.h"
#include "simulator/step.h"

namespace memtune {

struct Rules {
  std::int64_t accumulate = 1;
  bool host_computes = true;
  double link_slowdown = 0;  // by how much of its time an op of the compute resource takes longer while a link is busy
  AllocatorRules allocator;
  bool serial_copies = false;  // ranks behind one PCIe root copy one at a time in each direction, first come first served
  bool shares_cores = false;    // compute, host threads and copies of a class are work of the same cores, as on a CPU
  // Where devices of a node reach each other through host memory alone: the most of a root, to the device and to the host, that a
  // rank's link can take. 0: links have a way of their own.
  std::array<double, 2> link_of_root{};
};

// Where the ranks of a class stand: how many of them are behind the same PCIe root, and which root that is.
struct Place {
  std::int32_t root = 0, ranks_on_root = 1;
};

struct ClassTimeline : Footprint {
  double finish_s = 0;                          // when its last op, or its host, has finished
  std::array<double, kResources> busy_s{};      // by resource, all repetitions
  std::array<double, kResources> exposed_s{};   // of that, not hidden behind compute
  std::vector<double> op_exposed_s;             // by op; 0 for compute
  std::vector<std::int32_t> storage_stream;     // allocations (storage + 1) and frees (-(storage + 1)) in order
};

// A part of the critical path: an op that runs, or the host that issues it.
struct PathPart {
  std::int32_t rank_class, op;
  bool host;
  double start_s, stop_s;
};

struct Timeline {
  double step_s = 0;
  std::vector<ClassTimeline> classes;
  std::vector<PathPart> critical_path;  // in order; without gaps from 0 to step_s
};

// Forward, recompute and backward ops run `accumulate` times, the prologue in the first repetition, boundary and optimizer in
// the last. An op starts as soon as
//   1. the host has come to it, in program order, and has spent `op_issue_s` on it; where `host_computes`, the host is busy while
//      an op of the compute stream runs, else it runs ahead of the device;
//   2. its stream has finished the ops before it: each resource has a stream, ops may keep another one's order (`op_stream`);
//   3. the storages that it reads have been written, those that it writes have been read, and transfers of storages that were freed
//      before it on the compute stream have finished;
//   4. compute has come far enough (`op_prefetch`);
//   5. its resource is free; of several streams that wait for one, the highest number goes first and is not interrupted;
//   6. the ops of other classes with its `op_match` have come as far: they hold their resources, start together, and each takes
//      as long as the slowest of them.
// Compute is slower while a link of its class is busy; copies between host and device share the PCIe root evenly,
// or with `serial_copies` one at a time. With `shares_cores` compute, host threads and copies of a class that run
// at the same time have equal parts of its cores, and all of them are slower while a link is busy: nothing but drives, and links
// that need few cores, overlaps with compute.
// With `link_of_root` the root is shared as well by ops of `kIntraLink` that use device memory, in both directions at once; each
// takes its even share, and copies have what these leave.
// Throws std::invalid_argument where ops wait for each other.
Timeline schedule(std::span<const Step> steps, std::span<const Place> places, const Rules& rules);

}  // namespace memtune
