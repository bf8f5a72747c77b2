#include "tsplit/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <tuple>
#include <utility>
#include <vector>

#include "columns.h"
#include "tsplit/greedy.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::array, memtune::Column, memtune::Made, memtune::span;

namespace {

using I32 = Column<std::int32_t>;
using I64 = Column<std::int64_t>;
using F64 = Column<double>;
using Link = std::tuple<I32, F64, F64, F64>;

memtune::tsplit::Link seen(const Link& link) {
  return {span(std::get<0>(link)), span(std::get<1>(link)), span(std::get<2>(link)), span(std::get<3>(link))};
}

Made<std::int32_t> tsplit_greedy(const I64& live_bytes, const I32& tensor, const I32& number, const I32& part_of, const F64& more_s,
                                 const I32& free_action, const I32& first, const I32& stop, const I64& n_bytes, const Link& out,
                                 const Link& back, std::int64_t budget_bytes, bool beyond) {
  const memtune::tsplit::Problem problem{
      span(live_bytes), span(tensor), span(number), span(part_of), span(more_s), span(free_action),
      span(first),      span(stop),   span(n_bytes), seen(out),    seen(back)};
  std::vector<std::int32_t> choice;
  {
    nb::gil_scoped_release others_run;
    choice = memtune::tsplit::greedy(problem, budget_bytes, beyond);
  }
  return array(std::move(choice));
}

}  // namespace

void bind_tsplit(nb::module_& m) {
  m.def("tsplit_greedy", &tsplit_greedy, "live_bytes"_a, "tensor"_a, "number"_a, "part_of"_a, "more_s"_a, "free_action"_a, "first"_a,
        "stop"_a, "n_bytes"_a, "out"_a, "back"_a, "budget_bytes"_a, "beyond"_a,
        "By tensor the number of the action that TSPLIT's greedy planner takes, 0 for none. A link is (action, start_s, end_s, "
        "copy_s) of its copies. ValueError for columns that do not belong together.");
}
