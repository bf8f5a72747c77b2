#include "simulator/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include "simulator/live.h"
#include "simulator/machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::span<const T> span(const Column<T>& column) {
  return {column.data(), column.size()};
}

// Keeps the buffers of a step alive and looks at them; built once, then asked at either level.
class Columns {
 public:
  Columns(Column<std::uint8_t> op_phase, Column<std::uint8_t> op_resource, Column<double> op_s, Column<double> op_issue_s,
          Column<std::int64_t> bytes, Column<std::uint8_t> tier, Column<std::uint8_t> kind, Column<std::int32_t> producer,
          Column<std::int32_t> held_until, Column<std::int32_t> use_op, Column<std::int32_t> use_storage,
          Column<std::uint8_t> use_mutates, Column<std::int32_t> save_storage, Column<std::int32_t> save_until)
      : op_phase_(op_phase), op_resource_(op_resource), op_s_(op_s), op_issue_s_(op_issue_s), bytes_(bytes), tier_(tier),
        kind_(kind), producer_(producer), held_until_(held_until), use_op_(use_op), use_storage_(use_storage),
        use_mutates_(use_mutates), save_storage_(save_storage), save_until_(save_until) {
    step().check();
  }

  memtune::Step step() const {
    return {span(op_phase_), span(op_resource_), span(op_s_), span(op_issue_s_), span(bytes_), span(tier_), span(kind_),
            span(producer_), span(held_until_), span(use_op_), span(use_storage_), span(use_mutates_), span(save_storage_),
            span(save_until_)};
  }

 private:
  Column<std::uint8_t> op_phase_, op_resource_;
  Column<double> op_s_, op_issue_s_;
  Column<std::int64_t> bytes_;
  Column<std::uint8_t> tier_, kind_;
  Column<std::int32_t> producer_, held_until_, use_op_, use_storage_;
  Column<std::uint8_t> use_mutates_;
  Column<std::int32_t> save_storage_, save_until_;
};

memtune::Live live(const Columns& columns, std::int64_t rounding_bytes, std::int64_t small_bytes) {
  if (rounding_bytes < 1) throw std::invalid_argument("rounding_bytes must be at least 1");
  const memtune::Step step = columns.step();
  nb::gil_scoped_release released;
  return memtune::live(step, {rounding_bytes, small_bytes});
}

memtune::Timeline schedule(const Columns& columns, std::int64_t accumulate, bool host_computes) {
  const memtune::Step step = columns.step();
  nb::gil_scoped_release released;
  return memtune::schedule(step, accumulate, host_computes);
}

}  // namespace

void bind_simulator(nb::module_& m) {
  nb::class_<Columns>(m, "StepColumns", "The columns of one step with the seconds of its ops, checked once; ValueError names a bad column.")
      .def(nb::init<Column<std::uint8_t>, Column<std::uint8_t>, Column<double>, Column<double>, Column<std::int64_t>,
                    Column<std::uint8_t>, Column<std::uint8_t>, Column<std::int32_t>, Column<std::int32_t>,
                    Column<std::int32_t>, Column<std::int32_t>, Column<std::uint8_t>, Column<std::int32_t>,
                    Column<std::int32_t>>(),
           "op_phase"_a, "op_resource"_a, "op_s"_a, "op_issue_s"_a, "bytes"_a, "tier"_a, "kind"_a, "producer"_a,
           "held_until"_a, "use_op"_a, "use_storage"_a, "use_mutates"_a, "save_storage"_a, "save_until"_a);
  nb::class_<memtune::Live>(m, "Live", "Peaks of one step and sums of its resources.")
      .def_ro("peak_bytes", &memtune::Live::peak_bytes, "By tier.")
      .def_ro("peak_op", &memtune::Live::peak_op, "First op at the peak of each tier, -1 for a step without ops.")
      .def_ro("pool_peak_bytes", &memtune::Live::pool_peak_bytes, "On the device: of small requests, of large ones.")
      .def_ro("bytes_by_kind", &memtune::Live::bytes_by_kind,
              "On the device at its peak, by kind; the last one holds the temporaries that autograd saved.")
      .def_ro("busy_s", &memtune::Live::busy_s, "By resource (the last one is the host issuing ops) and phase.");
  nb::class_<memtune::Timeline>(m, "Timeline", "What came of scheduling one optimizer step.")
      .def_ro("step_s", &memtune::Timeline::step_s)
      .def_ro("busy_s", &memtune::Timeline::busy_s, "By resource; the last one is the host issuing ops.")
      .def_ro("exposed_s", &memtune::Timeline::exposed_s, "By resource: busy while compute is not.");
  m.def("live", &live, "columns"_a, "rounding_bytes"_a = 1, "small_bytes"_a = 0,
        "Live bytes of a step by tier and kind, and how long it needs each resource.");
  m.def("schedule", &schedule, "columns"_a, "accumulate"_a = 1, "host_computes"_a = true,
        "When the ops of one optimizer step run: each resource in program order, after what an op depends on.");
}
