#include "simulator/live.h"

#include <stdexcept>

#include "check.h"
#include "step_data.h"

using namespace memtune;

namespace {

// Three ops: forward, backward, optimizer. Storage 0 is a parameter, 1 a saved activation, 2 a gradient, 3 a copy on the host.
StepData training() {
  return {
      .op_phase = {kForward, kBackward, kOptimizer}, .op_resource = {kCompute, kCompute, 7}, .op_s = {1, 2, 4}, .op_issue_s = {.5, .5, .5},
      .bytes = {100, 1000, 10, 7}, .tier = {kDevice, kDevice, kDevice, kHost}, .kind = {0, kTemporary, 1, kTemporary},
      .producer = {-1, 0, 1, 1}, .held_until = {2147483647, -1, -1, -1},
      .use_op = {0, 1, 2, 2}, .use_storage = {0, 0, 0, 2}, .use_mutates = {0, 0, 1, 0},
      .save_storage = {1}, .save_until = {1}};
}

void peaks_and_kinds() {
  const Live out = live(training().view(), {});
  CHECK(out.peak_bytes[kDevice] == 1110);
  CHECK(out.peak_op[kDevice] == 1);
  CHECK(out.peak_bytes[kHost] == 7);
  CHECK(out.bytes_by_kind[0] == 100);
  CHECK(out.bytes_by_kind[1] == 10);
  CHECK(out.bytes_by_kind[kTemporary] == 0);
  CHECK(out.bytes_by_kind[kKinds] == 1000);
}

void donated_storage_is_freed_before_the_output() {
  StepData step = training();  // the gradient takes the activation's memory, unless autograd holds it
  step.use_op = {0, 1, 1, 2, 2};
  step.use_storage = {0, 0, 1, 0, 2};
  step.use_mutates = {0, 0, kHandsOver, 1, 0};
  step.save_until = {0};
  CHECK(live(step.view(), {}).peak_bytes[kDevice] == 1100);
  step.save_until = {1};  // autograd holds it
  CHECK(live(step.view(), {}).peak_bytes[kDevice] == 1110);
}

void rounding_and_pools() {
  const Live out = live(training().view(), {.rounding_bytes = 512, .small_bytes = 512});
  CHECK(out.peak_bytes[kDevice] == 512 + 1024 + 512);
  CHECK(out.pool_peak_bytes[0] == 512 + 512);
  CHECK(out.pool_peak_bytes[1] == 1024);
  CHECK(out.peak_bytes[kHost] == 7);
}

void resource_sums() {
  const Live out = live(training().view(), {});
  CHECK(out.busy_s[kCompute][kForward] == 1);
  CHECK(out.busy_s[kCompute][kBackward] == 2);
  CHECK(out.busy_s[7][kOptimizer] == 4);
  CHECK(out.busy_s[kHostIssue][kOptimizer] == .5);
}

void empty_step() {
  const Live out = live(StepData{}.view(), {});
  CHECK(out.peak_bytes[kDevice] == 0);
  CHECK(out.peak_op[kDevice] == -1);
}

bool refused(const StepData& step) {
  try {
    step.view().check();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void bad_columns_are_refused() {
  CHECK(!refused(training()));
  StepData step = training();
  step.use_storage[0] = 4;
  CHECK(refused(step));
  step = training();
  step.producer[0] = 3;
  CHECK(refused(step));
  step = training();
  step.tier.pop_back();
  CHECK(refused(step));
  step = training();
  step.use_op = {0, 2, 1, 2};
  CHECK(refused(step));
}

}  // namespace

int main() {
  peaks_and_kinds();
  donated_storage_is_freed_before_the_output();
  rounding_and_pools();
  resource_sums();
  empty_step();
  bad_columns_are_refused();
}
