#include "simulator/machine.h"

#include <cmath>

#include "check.h"
#include "step_data.h"

using namespace memtune;

namespace {

constexpr std::uint8_t kToDevice = 1, kToHost = 2;

bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

// Op 0 computes storage 0, op 1 copies it to storage 1, op 2 computes something else, op 3 reads the copy.
StepData copy_beside_compute() {
  return {
      .op_phase = {kForward, kForward, kForward, kForward}, .op_resource = {kCompute, kToHost, kCompute, kCompute},
      .op_s = {1, 5, 3, 1}, .op_issue_s = {0, 0, 0, 0}, .bytes = {8, 8}, .tier = {kDevice, kHost}, .kind = {5, 5},
      .producer = {0, 1}, .held_until = {-1, -1},
      .use_op = {1, 3}, .use_storage = {0, 1}, .use_mutates = {0, 0}, .save_storage = {}, .save_until = {}};
}

void a_copy_is_hidden_as_far_as_compute_lasts() {
  const Timeline out = schedule(copy_beside_compute().view(), 1, true);
  CHECK(near(out.step_s, 7));  // 1, then 5 of copy beside 3 of compute, then 1
  CHECK(near(out.busy_s[kToHost], 5));
  CHECK(near(out.exposed_s[kToHost], 2));
}

void a_writer_waits_for_readers() {
  StepData step = copy_beside_compute();
  step.use_op = {1, 2, 3};
  step.use_storage = {0, 0, 1};
  step.use_mutates = {0, 1, 0};  // op 2 now overwrites what op 1 is copying
  CHECK(near(schedule(step.view(), 1, true).step_s, 1 + 5 + 3 + 1));
}

void the_host_issues_one_op_after_another() {
  StepData step = copy_beside_compute();
  step.op_resource = {kCompute, kCompute, kCompute, kCompute};
  step.op_s = {.1, .1, .1, .1};
  step.op_issue_s = {1, 1, 1, 1};
  const Timeline out = schedule(step.view(), 1, false);
  CHECK(near(out.step_s, 4.1));
  CHECK(near(out.busy_s[kHostIssue], 4));
  CHECK(near(out.exposed_s[kHostIssue], 4 - .3));
}

void a_copy_waits_for_a_computing_host_only() {
  StepData step = copy_beside_compute();
  step.op_resource = {kCompute, kToDevice, kCompute, kCompute};
  step.use_op = {3};
  step.use_storage = {1};
  step.use_mutates = {0};
  CHECK(near(schedule(step.view(), 1, true).step_s, 1 + 5 + 1));  // the host comes to the copy after op 0
  CHECK(near(schedule(step.view(), 1, false).step_s, 5 + 1));     // issued at once
}

void an_op_without_duration_keeps_its_place() {
  StepData step = copy_beside_compute();
  step.op_resource = {kCompute, kToHost, kToHost, kToHost};
  step.op_s = {2, 0, 1, 0};
  step.use_op = {1};
  step.use_storage = {0};
  step.use_mutates = {0};
  CHECK(near(schedule(step.view(), 1, false).step_s, 3));  // op 1 waits for op 0, and op 2 comes after op 1
}

// Each repetition makes storage 0 anew, copies it to the host for long, and writes into it.
void a_storage_made_again_has_no_readers() {
  StepData step = copy_beside_compute();
  step.op_phase = {kForward, kForward, kForward};
  step.op_resource = {kCompute, kCompute, kToHost};
  step.op_s = {1, 1, 10};
  step.op_issue_s = {0, 0, 0};
  step.use_op = {1, 2};
  step.use_storage = {0, 0};
  step.use_mutates = {1, 0};
  step.producer = {0, -1};
  const Timeline out = schedule(step.view(), 2, false);
  CHECK(near(out.step_s, 2 + 10 + 10));
  CHECK(near(out.exposed_s[kToHost], 20 - 2));  // compute of the second repetition runs beside the first copy
}

void only_the_body_repeats() {
  StepData step = copy_beside_compute();
  step.op_phase = {kPrologue, kForward, kBackward, kOptimizer};
  step.op_resource = {kCompute, kCompute, kCompute, kCompute};
  CHECK(near(schedule(step.view(), 3, true).step_s, 1 + 3 * (5 + 3) + 1));
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
}
