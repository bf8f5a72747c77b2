#include "vmm/bind.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "vmm/process.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace vmm = memtune::vmm;

namespace {

using PartRow = std::tuple<std::uint64_t, std::int64_t, bool>;
using RegionRow = std::tuple<std::uint64_t, std::int64_t, std::int64_t, std::string, std::vector<PartRow>>;

std::vector<RegionRow> region_rows(int device) {
  std::vector<RegionRow> rows;
  for (const vmm::Region& region : vmm::regions(device)) {
    std::vector<PartRow> parts;
    for (const vmm::Region::Part& part : region.parts) parts.emplace_back(part.address, part.bytes, part.in_use);
    rows.emplace_back(region.address, region.bytes, region.stream, region.kind, std::move(parts));
  }
  return rows;
}

}  // namespace

void bind_vmm(nb::module_& m) {
  using Options = vmm::AllocatorOptions;
  using Statistics = vmm::Statistics;
  nb::class_<Options>(m, "ArenaOptions", "Options of memtune's allocator.")
      .def("__init__",
           [](Options* made, bool defragment, std::int64_t stitch_from_bytes, std::int64_t reuse_limit, std::int64_t most_stitched_bytes,
              std::int64_t arena_below_bytes, bool planned, std::int64_t replan_after, std::int64_t window, double layout_s, bool pools,
              std::int64_t transient_within) {
             new (made) Options{};
             made->stitch = {defragment, stitch_from_bytes, reuse_limit, most_stitched_bytes};
             made->arena_below_bytes = arena_below_bytes;
             made->planned = planned;
             made->plan.watch.replan_after = replan_after;
             made->plan.watch.window = window;
             made->plan.layout_s = layout_s;
             made->pools = pools;
             made->transient_within = transient_within;
           },
           nb::kw_only(), "defragment"_a = true, "stitch_from_bytes"_a = 0, "reuse_limit"_a = 10,
           "most_stitched_bytes"_a = std::int64_t{1} << 40, "arena_below_bytes"_a = Options{}.arena_below_bytes, "planned"_a = false,
           "replan_after"_a = vmm::WatchOptions{}.replan_after, "window"_a = vmm::WatchOptions{}.window,
           "layout_s"_a = vmm::PlanOptions{}.layout_s, "pools"_a = false, "transient_within"_a = Options{}.transient_within);
  nb::class_<Statistics>(m, "ArenaStatistics", "Counters of an allocator of this process.")
      .def_ro("allocated_bytes", &Statistics::allocated_bytes)
      .def_ro("peak_allocated_bytes", &Statistics::peak_allocated_bytes)
      .def_ro("reserved_bytes", &Statistics::reserved_bytes)
      .def_ro("peak_reserved_bytes", &Statistics::peak_reserved_bytes)
      .def_ro("driver_calls", &Statistics::driver_calls)
      .def_ro("requests", &Statistics::requests)
      .def_ro("failures", &Statistics::failures)
      .def_ro("stitched_bytes", &Statistics::stitched_bytes, "Addresses in stitched blocks.")
      .def_prop_ro("states", [](const Statistics& s) { return std::to_array(s.states); }, "How often GMLake's states S1 to S5 were reached.")
      .def_ro("plan_bytes", &Statistics::plan_bytes, "Height of the planned arena.")
      .def_ro("plan_bound_bytes", &Statistics::plan_bound_bytes, "The most bytes of the plan alive at once.")
      .def_ro("plan_requests", &Statistics::plan_requests, "Requests of a step that have a place.")
      .def_ro("plan_served", &Statistics::plan_served)
      .def_ro("deviations", &Statistics::deviations, "Requests that were not as planned.")
      .def_ro("plans", &Statistics::plans, "How often a step was laid out, or its lifetimes were learned.")
      .def_ro("first_deviation", &Statistics::first_deviation);
  m.attr("ARENA_CPU") = vmm::kCpu;
  m.def("arena_open", &vmm::open, "device"_a, "Creates the allocator of a device if there is none; returns '' or the reason why it cannot.");
  m.def("arena_replace", &vmm::replace, "device"_a, "options"_a,
        "Replaces the allocator of a device; the old one ends when its blocks have been freed. Returns '' or the reason why it cannot.");
  m.def("arena_defaults", &vmm::set_defaults, "options"_a, "Options for GPUs whose allocator torch's first request there makes.");
  m.def("arena_limit", &vmm::limit, "device"_a, "n_bytes"_a, "The most bytes that an allocator takes from the driver from now on.");
  m.def("arena_regions", &region_rows, "device"_a,
        "Memory from the driver as (address, bytes, stream, kind, [(address, bytes, in use)]); stream -1: of several.");
  m.def("arena_begin_update", &vmm::begin_update, "device"_a,
        "Notifies an allocator that the optimizer begins: the first update makes the state.", nb::call_guard<nb::gil_scoped_release>());
  m.def("arena_end_step", &vmm::end_step, "device"_a, "Notifies an allocator that a training step has ended.",
        nb::call_guard<nb::gil_scoped_release>());
  m.def("arena_release_unused", &vmm::release_unused, "device"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("arena_restart_peaks", &vmm::restart_peaks, "device"_a);
  m.def("arena_statistics", &vmm::statistics, "device"_a);
  m.def("arena_cuda_functions", [] {
    return std::array{reinterpret_cast<std::uintptr_t>(&memtune_cuda_alloc), reinterpret_cast<std::uintptr_t>(&memtune_cuda_free),
                      reinterpret_cast<std::uintptr_t>(&memtune_cuda_record_stream),
                      reinterpret_cast<std::uintptr_t>(&memtune_cuda_memory_fraction),
                      reinterpret_cast<std::uintptr_t>(&memtune_cuda_empty_cache)};
  }, "Addresses of the C functions of torch's pluggable allocator: alloc, free, record_stream, memory_fraction, empty_cache.");
  m.def("arena_functions", [] {
    return std::array{reinterpret_cast<std::uintptr_t>(&memtune_arena_take), reinterpret_cast<std::uintptr_t>(&memtune_arena_give)};
  }, "Addresses of the C functions that take and give memory of the CPU's allocator.");
}
