#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "columns.h"
#include "simulator/allocator.h"
#include "simulator/bind.h"

namespace nb = nanobind;
using namespace nb::literals;
using memtune::Column, memtune::span;

namespace {

using Numbers = memtune::Made<std::int64_t>;

// A view of a column of the replay, which it keeps alive.
template <auto Member>
Numbers column(nb::handle self) {
  auto& values = nb::cast<memtune::AllocatorReplay&>(self).*Member;
  return Numbers(values.data(), {values.size()}, self);
}

template <typename T>
std::span<const T> held_column(const nb::dict& held, const char* name) {
  return span(nb::cast<Column<T>>(held[name]));  // the dict keeps it alive
}

memtune::HeldMemory held_memory(const nb::dict& held) {
  if (held.size() == 0) return {};
  return {.segment_address = held_column<std::int64_t>(held, "segment_address"),
          .segment_bytes = held_column<std::int64_t>(held, "segment_bytes"),
          .segment_stream = held_column<std::int32_t>(held, "segment_stream"),
          .segment_small = held_column<std::uint8_t>(held, "segment_small"),
          .block_address = held_column<std::int64_t>(held, "block_address"),
          .block_bytes = held_column<std::int64_t>(held, "block_bytes")};
}

memtune::AllocatorReplay replay(Column<std::uint8_t> action, Column<std::int32_t> storage, Column<std::int64_t> bytes,
                                Column<std::int32_t> stream, Column<std::int64_t> op, Column<std::int64_t> ready_op,
                                Column<std::int64_t> step, std::optional<std::int64_t> max_split_bytes,
                                std::optional<std::int64_t> max_non_split_rounding_bytes, std::int64_t large_segment_bytes,
                                std::array<std::int64_t, memtune::kRoundupIntervals> roundup_divisions,
                                double garbage_collection_threshold, bool expandable_segments, bool async,
                            std::optional<memtune::vmm::AllocatorOptions> arena,
                                std::optional<std::int64_t> capacity_bytes, std::optional<std::int64_t> allowed_bytes,
                                bool timeline, const nb::typed<nb::dict, nb::str, nb::object>& held) {
  const memtune::AllocatorEvents events{span(action), span(storage),  span(bytes), span(stream),
                                        span(op),     span(ready_op), span(step),  held_memory(held)};
  const memtune::AllocatorConfig config{
      .max_split_bytes = max_split_bytes.value_or(memtune::kUnlimited),
      .max_non_split_rounding_bytes = max_non_split_rounding_bytes.value_or(large_segment_bytes),
      .large_segment_bytes = large_segment_bytes,
      .roundup_divisions = roundup_divisions,
      .garbage_collection_threshold = garbage_collection_threshold,
      .expandable_segments = expandable_segments,
      .async = async,
      .arena = arena,
      .capacity_bytes = capacity_bytes.value_or(memtune::kUnlimited),
      .allowed_bytes = allowed_bytes.value_or(memtune::kUnlimited)};
  nb::gil_scoped_release released;
  return memtune::replay(events, config, timeline);
}

}  // namespace

void bind_allocator(nb::module_& m) {
  using memtune::AllocatorReplay;
  using memtune::OutOfMemory;
  nb::class_<OutOfMemory>(m, "OutOfMemory", "The first allocation that could not be served; event is -1 where there is none.")
      .def_ro("event", &OutOfMemory::event)
      .def_ro("requested_bytes", &OutOfMemory::requested_bytes)
      .def_ro("allocated_bytes", &OutOfMemory::allocated_bytes)
      .def_ro("reserved_bytes", &OutOfMemory::reserved_bytes)
      .def_ro("largest_free_bytes", &OutOfMemory::largest_free_bytes);
  nb::class_<AllocatorReplay>(m, "AllocatorReplay", "State of the caching allocator over a stream of allocations and frees.")
      .def_ro("peak_reserved_bytes", &AllocatorReplay::peak_reserved_bytes)
      .def_ro("peak_allocated_bytes", &AllocatorReplay::peak_allocated_bytes)
      .def_ro("peak_event", &AllocatorReplay::peak_event, "First event at the peak of reserved bytes, -1 without events.")
      .def_ro("allocated_at_peak_bytes", &AllocatorReplay::allocated_at_peak_bytes)
      .def_ro("end_reserved_bytes", &AllocatorReplay::end_reserved_bytes)
      .def_ro("end_allocated_bytes", &AllocatorReplay::end_allocated_bytes)
      .def_ro("device_allocs", &AllocatorReplay::device_allocs, "Calls of cudaMalloc, or of mapping pages.")
      .def_ro("device_frees", &AllocatorReplay::device_frees)
      .def_ro("retries", &AllocatorReplay::retries, "How often everything cached was given back for one allocation.")
      .def_ro("ooms", &AllocatorReplay::ooms)
      .def_ro("first_oom", &AllocatorReplay::first_oom)
      .def_prop_ro("step_reserved_bytes", &column<&AllocatorReplay::step_reserved_bytes>, "Peak by step.")
      .def_prop_ro("step_allocated_bytes", &column<&AllocatorReplay::step_allocated_bytes>, "Peak by step.")
      .def_prop_ro("step_device_calls", &column<&AllocatorReplay::step_device_calls>, "Calls of the driver by step.")
      .def_ro("plan_bytes", &AllocatorReplay::plan_bytes, "Height of the planned arena.")
      .def_ro("plan_bound_bytes", &AllocatorReplay::plan_bound_bytes, "The most bytes of the plan alive at once.")
      .def_ro("deviations", &AllocatorReplay::deviations, "Requests that were not as planned.")
      .def_prop_ro("reserved_bytes", &column<&AllocatorReplay::reserved_bytes>, "After each event, empty without `timeline`.")
      .def_prop_ro("allocated_bytes", &column<&AllocatorReplay::allocated_bytes>, "After each event, empty without `timeline`.")
      .def_prop_ro("address", &column<&AllocatorReplay::address>, "Of each allocation, else -1; empty without `timeline`.");
  m.def("replay_allocator", &replay, "action"_a, "storage"_a, "bytes"_a, "stream"_a, "op"_a, "ready_op"_a, "step"_a,
        "max_split_bytes"_a = nb::none(), "max_non_split_rounding_bytes"_a = nb::none(),
        "large_segment_bytes"_a = memtune::AllocatorConfig{}.large_segment_bytes,
        "roundup_divisions"_a = memtune::AllocatorConfig{}.roundup_divisions,
        "garbage_collection_threshold"_a = 0.0, "expandable_segments"_a = false, "asynchronous"_a = false,
        "arena"_a = nb::none(),
        "capacity_bytes"_a = nb::none(), "allowed_bytes"_a = nb::none(), "timeline"_a = false,
        "held"_a = nb::dict(),
        "Runs allocations (action 0), frees (1) and calls of empty_cache (2) through PyTorch's CUDA caching allocator.");
}
