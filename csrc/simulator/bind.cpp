#include "simulator/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "columns.h"
#include "simulator/least.h"
#include "simulator/live.h"
#include "simulator/machine.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::Column, memtune::span;

namespace {

// Keeps the buffers of a step alive and looks at them; built once, then asked at either level.
class Columns {
 public:
  Columns(Column<std::uint8_t> op_phase, Column<std::uint8_t> op_resource, Column<double> op_s, Column<double> op_issue_s,
          Column<std::int64_t> bytes, Column<std::uint8_t> tier, Column<std::uint8_t> kind, Column<std::int32_t> producer,
          Column<std::int32_t> held_until, Column<std::int32_t> use_op, Column<std::int32_t> use_storage,
          Column<std::uint8_t> use_mutates, Column<std::int32_t> save_storage, Column<std::int32_t> save_until,
          Column<std::uint8_t> op_stream, Column<std::uint8_t> op_prefetch, Column<std::int32_t> op_match)
      : op_phase_(op_phase), op_resource_(op_resource), op_s_(op_s), op_issue_s_(op_issue_s), bytes_(bytes), tier_(tier),
        kind_(kind), producer_(producer), held_until_(held_until), use_op_(use_op), use_storage_(use_storage),
        use_mutates_(use_mutates), save_storage_(save_storage), save_until_(save_until), op_stream_(op_stream),
        op_prefetch_(op_prefetch), op_match_(op_match) {
    step().check();
  }

  memtune::Step step() const {
    return {span(op_phase_), span(op_resource_), span(op_s_), span(op_issue_s_), span(bytes_), span(tier_), span(kind_),
            span(producer_), span(held_until_), span(use_op_), span(use_storage_), span(use_mutates_), span(save_storage_),
            span(save_until_), span(op_stream_), span(op_prefetch_), span(op_match_)};
  }

 private:
  Column<std::uint8_t> op_phase_, op_resource_;
  Column<double> op_s_, op_issue_s_;
  Column<std::int64_t> bytes_;
  Column<std::uint8_t> tier_, kind_;
  Column<std::int32_t> producer_, held_until_, use_op_, use_storage_;
  Column<std::uint8_t> use_mutates_;
  Column<std::int32_t> save_storage_, save_until_;
  Column<std::uint8_t> op_stream_, op_prefetch_;
  Column<std::int32_t> op_match_;
};

memtune::Live live(const Columns& columns, std::int64_t rounding_bytes, std::int64_t small_bytes) {
  if (rounding_bytes < 1) throw std::invalid_argument("rounding_bytes must be at least 1");
  const memtune::Step step = columns.step();
  nb::gil_scoped_release released;
  return memtune::live(step, {rounding_bytes, small_bytes});
}

using Places = std::vector<std::pair<std::int32_t, std::int32_t>>;

std::vector<memtune::Step> steps_of(const std::vector<const Columns*>& classes) {
  std::vector<memtune::Step> steps;
  for (const Columns* columns : classes) steps.push_back(columns->step());
  return steps;
}

std::vector<memtune::Place> places_of(const Places& places) {
  std::vector<memtune::Place> found;
  for (const auto& [root, ranks_on_root] : places) found.push_back({root, ranks_on_root});
  return found;
}

std::vector<double> least_s(const std::vector<const Columns*>& classes, const Places& places, std::int64_t accumulate,
                            bool host_computes, bool shares_cores) {
  const std::vector<memtune::Step> steps = steps_of(classes);
  const std::vector<memtune::Place> stand = places_of(places);
  nb::gil_scoped_release released;
  memtune::Rules rules;
  rules.accumulate = accumulate;
  rules.host_computes = host_computes;
  rules.shares_cores = shares_cores;
  return memtune::least_s(steps, stand, rules);
}

memtune::Timeline schedule(const std::vector<const Columns*>& classes, const Places& places, std::int64_t accumulate,
                           bool host_computes, double link_slowdown, std::int64_t rounding_bytes, std::int64_t small_bytes,
                           bool serial_copies, bool shares_cores, const std::pair<double, double>& link_of_root) {
  if (rounding_bytes < 1) throw std::invalid_argument("rounding_bytes must be at least 1");
  const std::vector<memtune::Step> steps = steps_of(classes);
  const std::vector<memtune::Place> stand = places_of(places);
  nb::gil_scoped_release released;
  const memtune::AllocatorRules allocator{rounding_bytes, small_bytes};
  return memtune::schedule(steps, stand, {accumulate, host_computes, link_slowdown, allocator, serial_copies, shares_cores,
                                          {link_of_root.first, link_of_root.second}});
}

// Arrays, since lists of objects would take longer than the simulation.
template <typename T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T, typename Row, typename Take>
Array<T> array(const std::vector<Row>& rows, Take take) {
  auto* values = new std::vector<T>();
  nb::capsule owner(values, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  for (const Row& row : rows) values->push_back(take(row));
  return {values->data(), {values->size()}, owner};
}

using PathColumns = std::tuple<Array<std::int32_t>, Array<std::int32_t>, Array<std::uint8_t>, Array<double>, Array<double>>;

PathColumns critical_path(const memtune::Timeline& timeline) {
  using memtune::PathPart;
  const std::vector<PathPart>& parts = timeline.critical_path;
  return {array<std::int32_t>(parts, [](const PathPart& part) { return part.rank_class; }),
          array<std::int32_t>(parts, [](const PathPart& part) { return part.op; }),
          array<std::uint8_t>(parts, [](const PathPart& part) { return part.host; }),
          array<double>(parts, [](const PathPart& part) { return part.start_s; }),
          array<double>(parts, [](const PathPart& part) { return part.stop_s; })};
}

Array<double> op_exposed_s(const memtune::ClassTimeline& timeline) {
  return array<double>(timeline.op_exposed_s, [](double each) { return each; });
}

Array<std::int32_t> storage_stream(const memtune::ClassTimeline& timeline) {
  return array<std::int32_t>(timeline.storage_stream, [](std::int32_t each) { return each; });
}

}  // namespace

void bind_simulator(nb::module_& m) {
  nb::class_<Columns>(m, "StepColumns", "The columns of one step with the seconds of its ops, checked once; ValueError names a bad column.")
      .def(nb::init<Column<std::uint8_t>, Column<std::uint8_t>, Column<double>, Column<double>, Column<std::int64_t>,
                    Column<std::uint8_t>, Column<std::uint8_t>, Column<std::int32_t>, Column<std::int32_t>,
                    Column<std::int32_t>, Column<std::int32_t>, Column<std::uint8_t>, Column<std::int32_t>,
                    Column<std::int32_t>, Column<std::uint8_t>, Column<std::uint8_t>, Column<std::int32_t>>(),
           "op_phase"_a, "op_resource"_a, "op_s"_a, "op_issue_s"_a, "bytes"_a, "tier"_a, "kind"_a, "producer"_a,
           "held_until"_a, "use_op"_a, "use_storage"_a, "use_mutates"_a, "save_storage"_a, "save_until"_a,
           "op_stream"_a, "op_prefetch"_a, "op_match"_a);
  nb::class_<memtune::Footprint>(m, "Footprint", "Peaks of a step.")
      .def_ro("peak_bytes", &memtune::Footprint::peak_bytes, "By tier.")
      .def_ro("peak_op", &memtune::Footprint::peak_op, "First op at the peak of each tier, -1 for a step without ops.")
      .def_ro("pool_peak_bytes", &memtune::Footprint::pool_peak_bytes, "On the device: of small requests, of large ones.")
      .def_ro("bytes_by_kind", &memtune::Footprint::bytes_by_kind,
              "On the device at its peak, by kind; the last one holds the temporaries that autograd saved.");
  nb::class_<memtune::Live, memtune::Footprint>(m, "Live", "Peaks of one step and sums of its resources.")
      .def_ro("busy_s", &memtune::Live::busy_s, "By resource (the last one is the host issuing ops) and phase.");
  nb::class_<memtune::ClassTimeline, memtune::Footprint>(m, "ClassTimeline", "One rank class in a simulated optimizer step.")
      .def_ro("finish_s", &memtune::ClassTimeline::finish_s, "When its last op, or its host, has finished.")
      .def_ro("busy_s", &memtune::ClassTimeline::busy_s, "By resource; the last one is the host issuing ops.")
      .def_ro("exposed_s", &memtune::ClassTimeline::exposed_s, "By resource: busy while compute is not.")
      .def_prop_ro("op_exposed_s", &op_exposed_s, nb::rv_policy::reference, "By op, all repetitions; 0 for compute.")
      .def_prop_ro("storage_stream", &storage_stream, nb::rv_policy::reference,
              "Allocations (storage + 1) and frees (-(storage + 1)) in order, beginning with what is there at the start.");
  nb::class_<memtune::Timeline>(m, "Timeline", "A simulated optimizer step of all rank classes.")
      .def_ro("step_s", &memtune::Timeline::step_s)
      .def_ro("classes", &memtune::Timeline::classes)
      .def_prop_ro("critical_path", &critical_path, nb::rv_policy::reference,
                   "Rank class, op, whether it is the host that issues the op, start, stop; in order, without gaps from 0 to `step_s`.");
  m.def("live", &live, "columns"_a, "rounding_bytes"_a = 1, "small_bytes"_a = 0,
        "Live bytes of a step by tier and kind, and how long it needs each resource.");
  m.def("least_s", &least_s, "classes"_a, "places"_a, "accumulate"_a = 1, "host_computes"_a = true, "shares_cores"_a = false,
        "A lower bound on the seconds of one optimizer step, by rank class; never above the result of `schedule`.");
  m.def("schedule", &schedule, "classes"_a, "places"_a, "accumulate"_a = 1, "host_computes"_a = true, "link_slowdown"_a = 0.0,
        "rounding_bytes"_a = 1, "small_bytes"_a = 0, "copies_in_turn"_a = false, "shares_cores"_a = false,
        "link_of_root"_a = std::pair(0.0, 0.0),
        "When the ops of one optimizer step run on every rank class. `places`: for each class its PCIe root and how many of its "
        "ranks are behind it. `copies_in_turn`: of the ranks behind a root one copies at a time. "
        "`shares_cores`: compute, host threads and copies share the cores of a class. "
        "`link_of_root`: where ranks reach each other through the host, the most of a root's rate, up and down, that a rank's link "
        "can take; 0 where links have a way of their own. ValueError where ops wait for each other.");
}
