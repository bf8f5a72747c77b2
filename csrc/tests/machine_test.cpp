#include "simulator/machine.h"

#include <array>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "step_data.h"

using namespace memtune;

namespace {

constexpr std::uint8_t kToDevice = kHostToDevice, kToHost = kDeviceToHost;

Timeline schedule(const Step& step, std::int64_t accumulate, bool host_computes, double link_slowdown = 0) {
  const Place place;
  return memtune::schedule({&step, 1}, {&place, 1}, {accumulate, host_computes, link_slowdown, {}});
}

bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

// Op 0 computes storage 0, op 1 copies it to storage 1, op 2 computes something else, op 3 reads the copy.
StepData copy_overlaps_compute() {
  return {
      .op_phase = {kForward, kForward, kForward, kForward}, .op_resource = {kCompute, kToHost, kCompute, kCompute},
      .op_s = {1, 5, 3, 1}, .op_issue_s = {0, 0, 0, 0}, .bytes = {8, 8}, .tier = {kDevice, kHost}, .kind = {5, 5},
      .producer = {0, 1}, .held_until = {-1, -1},
      .use_op = {1, 3}, .use_storage = {0, 1}, .use_mutates = {0, 0}, .save_storage = {}, .save_until = {}};
}

void a_copy_is_hidden_as_far_as_compute_lasts() {
  const Timeline out = schedule(copy_overlaps_compute().view(), 1, true);
  CHECK(near(out.step_s, 7));  // 1, then 5 of copy overlapped with 3 of compute, then 1
  CHECK(near(out.classes[0].busy_s[kToHost], 5));
  CHECK(near(out.classes[0].exposed_s[kToHost], 2));
}

void a_writer_waits_for_readers() {
  StepData step = copy_overlaps_compute();
  step.use_op = {1, 2, 3};
  step.use_storage = {0, 0, 1};
  step.use_mutates = {0, 1, 0};  // op 2 now overwrites what op 1 is copying
  CHECK(near(schedule(step.view(), 1, true).step_s, 1 + 5 + 3 + 1));
}

void the_host_issues_one_op_after_another() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kCompute, kCompute, kCompute, kCompute};
  step.op_s = {.1, .1, .1, .1};
  step.op_issue_s = {1, 1, 1, 1};
  const Timeline out = schedule(step.view(), 1, false);
  CHECK(near(out.step_s, 4.1));
  CHECK(near(out.classes[0].busy_s[kHostIssue], 4));
  CHECK(near(out.classes[0].exposed_s[kHostIssue], 4 - .3));
}

void a_copy_waits_for_a_computing_host_only() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kCompute, kToDevice, kCompute, kCompute};
  step.use_op = {3};
  step.use_storage = {1};
  step.use_mutates = {0};
  CHECK(near(schedule(step.view(), 1, true).step_s, 1 + 5 + 1));  // the host comes to the copy after op 0
  CHECK(near(schedule(step.view(), 1, false).step_s, 5 + 1));     // issued at once
}

void an_op_without_duration_keeps_its_place() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kCompute, kToHost, kToHost, kToHost};
  step.op_s = {2, 0, 1, 0};
  step.use_op = {1};
  step.use_storage = {0};
  step.use_mutates = {0};
  CHECK(near(schedule(step.view(), 1, false).step_s, 3));  // op 1 waits for op 0, and op 2 comes after op 1
}

// Each repetition makes storage 0 again, copies it to the host slowly, and writes to it.
void a_storage_made_again_has_no_readers() {
  StepData step = copy_overlaps_compute();
  step.op_phase = {kForward, kForward, kForward};
  step.op_stream = step.op_prefetch = {0, 0, 0};
  step.op_match = {0, 0, 0};
  step.op_resource = {kCompute, kCompute, kToHost};
  step.op_s = {1, 1, 10};
  step.op_issue_s = {0, 0, 0};
  step.use_op = {1, 2};
  step.use_storage = {0, 0};
  step.use_mutates = {1, 0};
  step.producer = {0, -1};
  const Timeline out = schedule(step.view(), 2, false);
  CHECK(near(out.step_s, 2 + 10 + 10));
  CHECK(near(out.classes[0].exposed_s[kToHost], 20 - 2));  // compute of the second repetition overlaps the first copy
}

void only_the_body_repeats() {
  StepData step = copy_overlaps_compute();
  step.op_phase = {kPrologue, kForward, kBackward, kOptimizer};
  step.op_resource = {kCompute, kCompute, kCompute, kCompute};
  CHECK(near(schedule(step.view(), 3, true).step_s, 1 + 3 * (5 + 3) + 1));
}

void the_critical_path_has_no_gaps() {
  const Timeline out = schedule(copy_overlaps_compute().view(), 1, true);
  const std::vector<std::int32_t> ops = {0, 1, 3};
  CHECK(out.critical_path.size() == ops.size());
  double at = 0;
  for (std::size_t i = 0; i < ops.size(); ++i) {
    CHECK(out.critical_path[i].op == ops[i]);
    CHECK(near(out.critical_path[i].start_s, at));
    at = out.critical_path[i].stop_s;
  }
  CHECK(near(at, out.step_s));
  CHECK(near(out.classes[0].op_exposed_s[1], 2));
}

void freed_storage_waits_for_transfer() {
  StepData step = copy_overlaps_compute();
  step.op_s = {1, 9, 1, 1};
  step.use_op = {1};
  step.use_storage = {0};
  step.use_mutates = {0};
  CHECK(near(schedule(step.view(), 1, false).step_s, 10));
  step.held_until = {2, -1};  // op 3 runs after storage 0 is freed
  CHECK(near(schedule(step.view(), 1, false).step_s, 11));
}

// Op 0 allocates what op 1 gathers into and op 2 reads, both on side stream 2; compute goes on meanwhile.
void memory_of_a_side_stream_is_reused_in_its_order() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kNothing, kIntraLink, kCompute, kCompute};
  step.op_stream = {0, 2, 2, 0};
  step.op_s = {0, 5, 5, 1};
  step.tier = {kDevice, kDevice};
  step.producer = {0, -1};
  step.use_op = {1, 2};
  step.use_storage = {0, 0};
  step.use_mutates = {1, 0};
  // The host has issued all repetitions before the first is over; each takes its block from the stream's pool.
  CHECK(schedule(step.view(), 4, false).classes[0].peak_bytes[kDevice] == step.bytes[0]);
  step.op_stream = {0, 2, 3, 0};  // freed on the host, in use by the other stream until it has read
  CHECK(schedule(step.view(), 4, false).classes[0].peak_bytes[kDevice] == 4 * step.bytes[0]);
}

void compute_is_slower_during_link_use() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kIntraLink, kCompute, kNothing, kNothing};
  step.op_s = {4, 4, 0, 0};
  step.use_op = {};
  step.use_storage = {};
  step.use_mutates = {};
  CHECK(near(schedule(step.view(), 1, false, 1).step_s, 6));
  CHECK(near(schedule(step.view(), 1, false, 0).step_s, 4));
}

void a_root_is_shared() {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kToDevice, kNothing, kNothing, kNothing};
  step.op_s = {4, 0, 0, 0};
  const std::array<Step, 2> steps = {step.view(), step.view()};
  const std::array<Place, 2> together = {Place{0, 1}, Place{0, 1}}, apart = {Place{0, 1}, Place{1, 1}};
  CHECK(near(memtune::schedule(steps, together, {}).step_s, 8));
  CHECK(near(memtune::schedule(steps, apart, {}).step_s, 4));
}

// Op 0 copies up, op 1 talks to other devices about device memory, or to their hosts about host memory.
StepData copy_overlaps_link(Tier tier) {
  StepData step = copy_overlaps_compute();
  step.op_resource = {kToDevice, kIntraLink, kNothing, kNothing};
  step.op_s = {4, 4, 0, 0};
  step.tier = {tier, kHost};
  step.producer = {-1, -1};
  step.use_op = {1};
  step.use_storage = {0};
  step.use_mutates = {0};
  return step;
}

void links_through_the_host_share_the_root() {
  const StepData step = copy_overlaps_link(kDevice), of_hosts = copy_overlaps_link(kHost);
  const auto takes = [](const Step& one, Place place, std::array<double, 2> link_of_root) {
    return memtune::schedule({&one, 1}, {&place, 1}, {.host_computes = false, .link_of_root = link_of_root}).step_s;
  };
  CHECK(near(takes(step.view(), {}, {}), 4));
  CHECK(near(takes(step.view(), {}, {1, 1}), 8));           // half of the root each, from begin to end
  CHECK(near(takes(step.view(), {0, 2}, {1, 1}), 16));      // as much of two ranks
  CHECK(near(takes(step.view(), {}, {0.25, 0.25}), 5));     // the copy gets what the link cannot take, then all of it
  CHECK(near(takes(step.view(), {}, {0.25, 1}), 5));        // down nothing else moves
  CHECK(near(takes(of_hosts.view(), {}, {1, 1}), 4));       // between hosts no root is crossed
}

void matched_links_are_as_fast_as_the_slowest() {
  StepData one = copy_overlaps_link(kDevice), other = one;
  other.op_resource[0] = kNothing;
  one.op_match = other.op_match = {0, 1, 0, 0};
  const std::array<Place, 2> apart = {Place{0, 1}, Place{1, 1}};
  const std::array<Step, 2> steps = {one.view(), other.view()};
  const Timeline out = memtune::schedule(steps, apart, {.host_computes = false, .link_of_root = {1, 1}});
  CHECK(near(out.classes[1].finish_s, 8));  // alone behind its root it waits for the class that shares its own with a copy
}

void matched_ops_start_together_or_never() {
  StepData one = copy_overlaps_compute(), other = copy_overlaps_compute();
  one.op_resource = other.op_resource = {kIntraLink, kIntraLink, kNothing, kNothing};
  one.use_op = other.use_op = one.use_storage = other.use_storage = {};
  one.use_mutates = other.use_mutates = {};
  one.op_s = {3, 2, 0, 0};
  other.op_s = {1, 5, 0, 0};
  one.op_match = other.op_match = {1, 2, 0, 0};
  const std::array<Place, 2> places{};
  CHECK(near(memtune::schedule(std::array{one.view(), other.view()}, places, {}).step_s, 3 + 5));
  other.op_match = {2, 1, 0, 0};
  bool refused = false;
  try {
    memtune::schedule(std::array{one.view(), other.view()}, places, {});
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

void no_classes_and_no_ops() {
  CHECK(memtune::schedule({}, {}, {}).step_s == 0);
  CHECK(schedule(StepData{}.view(), 1, true).step_s == 0);
}

}  // namespace

int main() {
  a_copy_is_hidden_as_far_as_compute_lasts();
  a_writer_waits_for_readers();
  the_host_issues_one_op_after_another();
  a_copy_waits_for_a_computing_host_only();
  an_op_without_duration_keeps_its_place();
  a_storage_made_again_has_no_readers();
  only_the_body_repeats();
  the_critical_path_has_no_gaps();
  freed_storage_waits_for_transfer();
  memory_of_a_side_stream_is_reused_in_its_order();
  compute_is_slower_during_link_use();
  a_root_is_shared();
  links_through_the_host_share_the_root();
  matched_links_are_as_fast_as_the_slowest();
  matched_ops_start_together_or_never();
  no_classes_and_no_ops();
}
