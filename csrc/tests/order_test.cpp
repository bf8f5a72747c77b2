#include "edit/order.h"

#include <stdexcept>

#include "check.h"

using memtune::Order;
using Rows = std::vector<std::int32_t>;
using Flags = std::vector<std::uint8_t>;

namespace {

void insertions_keep_the_order_of_the_calls() {
  // Before 1, before 1, after 0, at the end, before everything: rows 3 to 7.
  const Order order = memtune::order_rows(Flags{0, 0, 0}, Rows{1, 1, 0, 3, -1}, Flags{0, 0, 1, 0, 1});
  CHECK((order.rows == Rows{7, 0, 5, 3, 4, 1, 2, 6}));
  CHECK((order.position == Rows{1, 5, 6, 3, 4, 2, 7, 0, -1}));
  CHECK((Rows(order.position.begin(), order.position.end() - 1) == order.before));
  CHECK(order.before == order.next);
}

void removed_rows_point_at_their_neighbours() {
  const Order order = memtune::order_rows(Flags{1, 0, 1, 0, 1}, Rows{2}, Flags{0});
  CHECK((order.rows == Rows{1, 5, 3}));
  CHECK((order.position == Rows{-1, 0, -1, 2, -1, 1, -1}));
  CHECK((order.before == Rows{-1, 0, 1, 2, 2, 1}));
  CHECK((order.next == Rows{0, 0, 2, 2, 2, 1}));
}

void uses_are_sorted_by_op() {
  const memtune::Uses uses = memtune::sort_uses(Rows{2, 0, 2, 1}, Rows{7, 8, 9, 6}, Flags{0, 1, 1, 0}, 3);
  CHECK((uses.op == Rows{0, 1, 2, 2}));
  CHECK((uses.storage == Rows{8, 6, 7, 9}));
  CHECK((uses.mutates == Flags{1, 0, 0, 1}));
}

template <typename Call>
bool refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void rows_outside_are_refused() {
  CHECK(refused([] { memtune::order_rows(Flags{0}, Rows{2}, Flags{0}); }));
  CHECK(refused([] { memtune::order_rows(Flags{0}, Rows{-2}, Flags{0}); }));
  CHECK(refused([] { memtune::order_rows(Flags{0}, Rows{0, 0}, Flags{0}); }));
  CHECK(refused([] { memtune::sort_uses(Rows{3}, Rows{0}, Flags{0}, 3); }));
  CHECK(refused([] { memtune::sort_uses(Rows{-1}, Rows{0}, Flags{0}, 3); }));
}

}  // namespace

int main() {
  insertions_keep_the_order_of_the_calls();
  removed_rows_point_at_their_neighbours();
  uses_are_sorted_by_op();
  rows_outside_are_refused();
}
