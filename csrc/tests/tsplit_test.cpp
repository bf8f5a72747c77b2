#include "tsplit/greedy.h"

#include <stdexcept>

#include "check.h"

using memtune::tsplit::greedy;
using memtune::tsplit::Link;
using memtune::tsplit::Problem;

namespace {

using I32 = std::vector<std::int32_t>;
using I64 = std::vector<std::int64_t>;
using F64 = std::vector<double>;

// Two tensors that free the same moment: the first one as many bytes, the second one sooner to be had.
struct Two {
  I64 live{10, 30, 10};
  I32 tensor{0, 1}, number{1, 1}, part_of{-1, -1};
  F64 more_s{3.0, 1.0};
  I32 free_action{0, 1}, first{1, 1}, stop{2, 2};
  I64 n_bytes{10, 10};
  I32 copies{};
  F64 seconds{};

  Problem problem() const {
    const Link none{copies, seconds, seconds, seconds};
    return {live, tensor, number, part_of, more_s, free_action, first, stop, n_bytes, none, none};
  }
};

void the_cheaper_one_per_byte_goes_first() {
  const Two two;
  CHECK((greedy(two.problem(), 30, true) == I32{0, 0}));
  CHECK((greedy(two.problem(), 20, true) == I32{0, 1}));
  CHECK((greedy(two.problem(), 19, true) == I32{1, 1}));
  CHECK((greedy(two.problem(), 0, true) == I32{1, 1}));  // nothing is left that frees bytes at the peak
}

void bytes_beyond_the_budget_count_where_they_are_asked_for() {
  Two two;
  two.n_bytes = {20, 5};
  two.more_s = {3.0, 1.0};  // 0.15 and 0.2 a byte; 0.6 and 0.2 of the 5 that are over
  CHECK((greedy(two.problem(), 25, true) == I32{1, 0}));
  CHECK((greedy(two.problem(), 25, false) == I32{0, 1}));
}

void a_module_replaces_what_its_parts_had() {
  Two two;
  two.part_of = {-1, 0};
  two.n_bytes = {15, 10};
  CHECK((greedy(two.problem(), 20, true) == I32{0, 1}));
  CHECK((greedy(two.problem(), 15, true) == I32{1, 0}));
}

void a_copy_waits_for_the_one_before() {
  Two two;
  two.more_s = {0.0, 0.1};
  const I32 actions{0, 1};
  const F64 starts{0.0, 0.0}, ends{1.0, 9.0}, took{5.0, 4.0};
  Problem problem = two.problem();
  problem.out = Link{actions, starts, ends, took};  // the first waits for 4 seconds, the second for none
  CHECK((greedy(problem, 20, true) == I32{0, 1}));
}

template <typename Change>
bool refused(Change change) {
  Two two;
  change(two);
  try {
    greedy(two.problem(), 0, true);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void columns_that_do_not_belong_together_are_refused() {
  CHECK(refused([](Two& two) { two.number.pop_back(); }));
  CHECK(refused([](Two& two) { two.tensor[1] = 2; }));
  CHECK(refused([](Two& two) { two.stop[0] = 4; }));
  CHECK(refused([](Two& two) { two.free_action = {1, 0}; }));
}

}  // namespace

int main() {
  the_cheaper_one_per_byte_goes_first();
  bytes_beyond_the_budget_count_where_they_are_asked_for();
  a_module_replaces_what_its_parts_had();
  a_copy_waits_for_the_one_before();
  columns_that_do_not_belong_together_are_refused();
}
