#include <algorithm>
#include <limits>
#include <numeric>
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

bool meet(const Instance& instance, std::int32_t a, std::int32_t b) {
  for (const Piece p : instance.pieces[a]) {
    for (const Piece q : instance.pieces[b]) {
      if (p.lo < q.hi && q.lo < p.hi) return true;
    }
  }
  return false;
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

void first_fit_takes_the_lowest_free_place() {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    Rows rows = random_rows(random, 1 + random() % 80, 90, round % 2 ? 100 : 0);
    for (std::int64_t& each : rows.alignment) each = round % 3 == 0 ? std::int64_t{1} << random() % 4 : 1;
    const Instance instance = compile(rows.problem());
    std::vector<std::int32_t> order(instance.n());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    Layout layout;
    CHECK(first_fit(instance, order, std::numeric_limits<std::int64_t>::max(), Clock(5), layout));
    CHECK(rows.fault(instance, layout) == "");
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::int32_t b = order[i];
      std::int64_t lowest = 0;
      for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t j = 0; j < i; ++j) {
          const std::int64_t from = layout.offset[order[j]], to = from + instance.size[order[j]];
          if (!meet(instance, b, order[j]) || lowest >= to || from >= lowest + instance.size[b]) continue;
          lowest = instance.align(to, b);
          moved = true;
        }
      }
      CHECK(layout.offset[b] == lowest);
    }
    Layout other;
    CHECK(first_fit(instance, order, layout.height + 1, Clock(5), other) && other.offset == layout.offset);
    CHECK(!first_fit(instance, order, layout.height, Clock(5), other));
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
  Search search(instance);
  for (const Choice choice : {Choice::kFewest, Choice::kForced, Choice::kTightest, Choice::kRanked, Choice::kLearned}) {
    const Strategy strategy{choice, {0, 1, 2, 3, 4}};
    CHECK(search.run(3, strategy, 1000, Clock(5)) == Outcome::kFound && search.layout().height == 3);
    CHECK(search.run(2, strategy, 1000, Clock(5)) == Outcome::kNone);
    CHECK(search.run(3, strategy, 1, Clock(5)) == Outcome::kStopped);
  }
}

// The lowest height: some order in which each buffer rests on the highest end of what it meets and came before makes it.
std::int64_t lowest_height(const Instance& instance) {
  std::vector<std::int32_t> order(instance.n());
  std::iota(order.begin(), order.end(), 0);
  std::int64_t lowest = std::accumulate(instance.size.begin(), instance.size.end(), std::int64_t{0});
  do {
    Column end(instance.n(), 0);
    for (std::size_t i = 0; i < order.size(); ++i) {
      std::int64_t floor = 0;
      for (std::size_t j = 0; j < i; ++j) {
        if (meet(instance, order[i], order[j])) floor = std::max(floor, end[order[j]]);
      }
      end[order[i]] = floor + instance.size[order[i]];
    }
    lowest = std::min(lowest, *std::max_element(end.begin(), end.end()));
  } while (std::next_permutation(order.begin(), order.end()));
  return lowest;
}

void every_strategy_finds_the_optimum_and_proves_it() {
  std::mt19937_64 random(3);
  for (int round = 0; round < 60; ++round) {
    const Instance instance = compile(random_rows(random, 6, 12, round % 2 ? 12 : 0).problem());
    const std::int64_t lowest = lowest_height(instance);
    Search search(instance);
    for (const Choice choice : {Choice::kFewest, Choice::kForced, Choice::kTightest, Choice::kRanked, Choice::kLearned}) {
      Strategy strategy{choice, {0, 1, 2, 3, 4, 5}};
      std::shuffle(strategy.rank.begin(), strategy.rank.end(), random);
      CHECK(search.run(lowest, strategy, 100000, Clock(5)) == Outcome::kFound && search.layout().height == lowest);
      CHECK(search.run(lowest - 1, strategy, 100000, Clock(5)) == Outcome::kNone);
    }
  }
}

void what_is_cut_from_a_rectangle_is_packed_back() {
  std::mt19937_64 random(4);
  for (int round = 0; round < 30; ++round) {
    Rows rows{{0}, {256}, {256}, {1}, 0};
    while (rows.start.size() < 100) {
      const std::size_t i = random() % rows.start.size();
      const bool upright = random() % 2;
      const std::int64_t side = upright ? rows.end[i] - rows.start[i] : rows.size[i];
      if (side < 2) continue;
      const auto at = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(side - 1));
      rows.start.push_back(upright ? rows.start[i] + at : rows.start[i]);
      rows.end.push_back(rows.end[i]);
      rows.size.push_back(upright ? rows.size[i] : side - at);
      rows.alignment.push_back(1);
      (upright ? rows.end[i] : rows.size[i]) = upright ? rows.start[i] + at : at;
    }
    const Instance instance = compile(rows.problem());
    Strategy strategy{Choice::kFewest, std::vector<std::int32_t>(100)};
    std::iota(strategy.rank.begin(), strategy.rank.end(), 0);
    Search search(instance);
    const Outcome outcome = search.run(256, strategy, 2000, Clock(5));
    CHECK(outcome != Outcome::kNone);
    if (outcome == Outcome::kFound) CHECK(rows.fault(instance, search.layout()) == "");
  }
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
  first_fit_takes_the_lowest_free_place();
  a_clock_that_is_over_still_gives_a_layout();
  five_buffers_fill_twelve_bytes();
  every_strategy_finds_the_optimum_and_proves_it();
  what_is_cut_from_a_rectangle_is_packed_back();
  wrong_layouts_are_found();
  rows_that_are_no_buffers_are_refused();
}
