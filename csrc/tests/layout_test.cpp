#include <random>
#include <stdexcept>

#include "check.h"
#include "layout/exact.h"
#include "layout/heuristic.h"
#include "layout/search.h"
#include "layout/validate.h"

using namespace memtune::layout;
using Column = std::vector<std::int64_t>;

namespace {

struct Rows {
  Column start, end, size, alignment;
  std::int64_t period = 0;

  Problem problem() const { return {start, end, size, alignment, period}; }
  std::string fault(const Instance& instance, const Layout& layout) const {
    Column offset = layout.offset;
    for (std::int64_t& each : offset) each *= instance.unit;
    return memtune::layout::fault(start, end, size, alignment, period, offset, layout.height * instance.unit);
  }
};

Rows random_rows(std::mt19937_64& random, std::size_t n, std::int64_t span, std::int64_t period) {
  Rows rows;
  rows.period = period;
  for (std::size_t i = 0; i < n; ++i) {
    const auto start = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(period > 0 ? period : span));
    rows.start.push_back(start);
    rows.end.push_back(start + 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(span / 3)));
    rows.size.push_back(1 + static_cast<std::int64_t>(random() % 50));
    rows.alignment.push_back(1);
  }
  return rows;
}

void sections_are_moments_that_no_other_contains() {
  const Rows rows{{0, 1, 4, 6}, {5, 3, 8, 7}, {2, 4, 6, 8}, {2, 2, 2, 2}, 0};
  const Instance instance = compile(rows.problem());
  CHECK(instance.n_sections == 3);  // [1, 3), [4, 5), [6, 7)
  CHECK(instance.unit == 2);
  CHECK((section_totals(instance) == Column{3, 4, 7}));
}

void every_tier_makes_layouts() {
  std::mt19937_64 random(1);
  for (int round = 0; round < 40; ++round) {
    const Rows rows = random_rows(random, 60, 90, round % 2 ? 100 : 0);
    const Instance instance = compile(rows.problem());
    Layout online = best_fit(instance);
    CHECK(rows.fault(instance, online) == "");
    const Layout packed = pack(instance, 0, 7, Clock(0.01));
    CHECK(rows.fault(instance, packed) == "");
    CHECK(packed.height <= online.height);
    const Exact exact = improve(instance, packed, 0, Clock(0.05));
    CHECK(rows.fault(instance, exact.layout) == "");
    CHECK(exact.lower_bound <= exact.layout.height && exact.layout.height <= packed.height);
  }
}

void a_clock_that_is_over_still_gives_a_layout() {
  std::mt19937_64 random(2);
  const Rows rows = random_rows(random, 20000, 30000, 0);
  const Instance instance = compile(rows.problem());
  CHECK(rows.fault(instance, pack(instance, 0, 1, Clock(0))) == "");
}

void five_buffers_fill_twelve_bytes() {
  // Nothing is left over at any moment, and the search starts from a layout that shares nothing.
  const Rows rows{{0, 0, 3, 3, 6}, {3, 9, 6, 9, 9}, {8, 4, 4, 4, 4}, {1, 1, 1, 1, 1}, 0};
  const Instance instance = compile(rows.problem());
  Layout stacked{Column(5), 0};
  for (std::int32_t b = 0; b < 5; ++b) {
    stacked.offset[b] = stacked.height;
    stacked.height += instance.size[b];
  }
  const Exact exact = improve(instance, stacked, 0, Clock(5));
  CHECK(exact.layout.height * instance.unit == 12 && exact.lower_bound == exact.layout.height);
  Search search(instance, {0, 1, 2, 3, 4});
  CHECK(search.run(3, 1000, Clock(5)) == Outcome::kFound && search.layout().height == 3);
  CHECK(search.run(2, 1000, Clock(5)) == Outcome::kNone);
  CHECK(search.run(3, 1, Clock(5)) == Outcome::kStopped);
}

void wrong_layouts_are_found() {
  const Column start{0, 2}, end{4, 6}, size{3, 3}, alignment{1, 2};
  const auto why = [&](std::int64_t second, std::int64_t height) { return fault(start, end, size, alignment, 0, Column{0, second}, height); };
  CHECK(why(4, 7) == "");
  CHECK(why(2, 7) == "buffer 1 and buffer 0 are in one place at 2");
  CHECK(why(3, 7) == "buffer 1 is off its alignment");
  CHECK(why(4, 6).starts_with("a buffer ends at 7"));
  CHECK(why(-2, 7) == "buffer 1 has no offset");
  // On a circle of 5 the second one is still there when the first begins again.
  CHECK(!fault(Column{0, 4}, Column{1, 6}, size, alignment, 5, Column{0, 0}, 3).empty());
  CHECK(fault(Column{0, 4}, Column{1, 5}, size, alignment, 5, Column{0, 0}, 3).empty());
}

void rows_that_are_no_buffers_are_refused() {
  for (const Rows& rows : {Rows{{3}, {3}, {1}, {1}, 0}, Rows{{0}, {1}, {0}, {1}, 0}, Rows{{0}, {7}, {1}, {1}, 5}, Rows{{0}, {1}, {1}, {0}, 0}}) {
    bool refused = false;
    try {
      compile(rows.problem());
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
  }
}

}  // namespace

int main() {
  sections_are_moments_that_no_other_contains();
  every_tier_makes_layouts();
  a_clock_that_is_over_still_gives_a_layout();
  five_buffers_fill_twelve_bytes();
  wrong_layouts_are_found();
  rows_that_are_no_buffers_are_refused();
}
