#include "order/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "columns.h"
#include "order/graph.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::Column, memtune::Made, memtune::span;

namespace {

std::tuple<Made<std::int32_t>, std::int64_t, std::int64_t> low_peak_order(
    std::int32_t n_ops, const Column<std::int64_t>& bytes, const Column<std::int32_t>& producer, const Column<std::uint8_t>& outlives,
    const Column<std::int32_t>& use_op, const Column<std::int32_t>& use_storage, const Column<std::int32_t>& first,
    const Column<std::int32_t>& then) {
  const memtune::order::Graph graph = memtune::order::make_graph(n_ops, span(bytes), span(producer), span(outlives), span(use_op),
                                                                 span(use_storage), span(first), span(then));
  const auto peak = [&graph](const memtune::order::Ops& order) {
    const std::vector<std::int64_t> live = memtune::order::live_bytes(graph, order);
    return live.empty() ? graph.start_bytes : *std::max_element(live.begin(), live.end());
  };
  memtune::order::Ops order;
  memtune::order::Ops program(n_ops);
  std::iota(program.begin(), program.end(), 0);
  {
    nb::gil_scoped_release others_run;
    order = memtune::order::low_peak_order(graph);
  }
  const std::int64_t low = peak(order);
  return {memtune::array(std::move(order)), low, peak(program)};
}

}  // namespace

void bind_order(nb::module_& m) {
  m.def("low_peak_order", &low_peak_order, "n_ops"_a, "bytes"_a, "producer"_a, "stays"_a, "use_op"_a, "use_storage"_a, "first"_a,
        "then"_a,
        "(ops in an order with a low peak, its most live bytes, those of program order); the first is never above the second, and "
        "exact for up to 16 ops. ValueError for numbers out of range and pairs against program order.");
}
