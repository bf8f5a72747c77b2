#include "layout/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "columns.h"
#include "layout/exact.h"
#include "layout/heuristic.h"
#include "layout/validate.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::array, memtune::span;

namespace {

using Column = memtune::Column<std::int64_t>;
using Made = memtune::Made<std::int64_t>;

// (offsets, lower bound, nodes, seconds of the heuristic tier, of the exact tier)
std::tuple<Made, std::int64_t, std::int64_t, double, double> lay_out(const Column& start, const Column& end, const Column& size,
                                                                     const Column& alignment, std::int64_t period, std::int64_t goal_bytes,
                                                                     double heuristic_s, double exact_s, std::uint64_t seed) {
  namespace layout = memtune::layout;
  std::vector<std::int64_t> offsets;
  std::int64_t lower = 0, nodes = 0;
  double packed_s = 0, searched_s = 0;
  {
    nb::gil_scoped_release release;
    const layout::Clock clock(heuristic_s);
    const layout::Instance instance = layout::compile({span(start), span(end), span(size), span(alignment), period});
    const std::vector<std::int64_t> totals = layout::section_totals(instance);
    for (const std::int64_t total : totals) lower = std::max(lower, total);
    const std::int64_t goal = goal_bytes / instance.unit;
    layout::Layout best = layout::pack(instance, std::max(goal, lower), seed, clock);
    packed_s = clock.spent_s();
    if (exact_s > 0) {
      const layout::Clock search_clock(exact_s);
      layout::Exact exact = layout::solve(instance, std::move(best), goal, seed, exact_s);
      best = std::move(exact.layout);
      lower = exact.lower_bound;
      nodes = exact.nodes;
      searched_s = search_clock.spent_s();
    }
    offsets = std::move(best.offset);
    for (std::int64_t& offset : offsets) offset *= instance.unit;
    lower *= instance.unit;
  }
  return {array(std::move(offsets)), lower, nodes, packed_s, searched_s};
}

std::string layout_fault(const Column& start, const Column& end, const Column& size, const Column& alignment, std::int64_t period,
                         const Column& offset, std::int64_t height) {
  for (const Column* column : {&end, &size, &alignment, &offset}) {
    if (column->size() != start.size()) throw std::invalid_argument("columns must have the same length");
  }
  return memtune::layout::fault(span(start), span(end), span(size), span(alignment), period, span(offset), height);
}

}  // namespace

void bind_layout(nb::module_& m) {
  m.def("lay_out", &lay_out, "start"_a, "end"_a, "size"_a, "alignment"_a, "period"_a, "goal_bytes"_a, "heuristic_s"_a, "exact_s"_a, "seed"_a,
        "Offsets for buffers on a line (period 0) or a circle: (offsets, proven lower bound, placements tried by the exact tier, seconds "
        "on a core of the heuristic and of the exact tier). ValueError names an invalid row.");
  m.def("layout_fault", &layout_fault, "start"_a, "end"_a, "size"_a, "alignment"_a, "period"_a, "offset"_a, "height"_a,
        "The first error of a layout, '' if there is none.");
}
