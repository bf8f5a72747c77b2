#include "remat/bind.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

#include "columns.h"
#include "remat/trace.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace memtune::remat;

namespace {

template <typename T>
std::span<const T> span(const nb::dict& columns, const char* name) {
  return memtune::span<T>(nb::cast<memtune::Column<T>>(columns[name]));
}

template <typename T>
T option(const nb::dict& settings, const char* name, T fallback) {
  return settings.contains(name) ? nb::cast<T>(settings[name]) : fallback;
}

RuleKind rule_kind(const std::string& name) {
  if (name == "dtr") return RuleKind::dtr;
  if (name == "megtaichi") return RuleKind::megtaichi;
  if (name == "coop") return RuleKind::coop;
  throw std::invalid_argument("rule must be dtr, megtaichi or coop, not " + name);
}

Neighbours neighbours(const std::string& name) {
  if (name == "nothing") return Neighbours::nothing;
  if (name == "own") return Neighbours::own;
  if (name == "classes") return Neighbours::classes;
  if (name == "closure") return Neighbours::closure;
  if (name == "ancestors") return Neighbours::ancestors;
  throw std::invalid_argument("neighbours must be nothing, own, classes, closure or ancestors, not " + name);
}

Release release_of(const std::string& name) {
  if (name == "ignore") return Release::ignore;
  if (name == "evict") return Release::evict;
  if (name == "banish") return Release::banish;
  throw std::invalid_argument("release must be ignore, evict or banish, not " + name);
}

Settings settings_of(const nb::dict& from) {
  Settings settings;
  ArenaSettings& arena = settings.arena;
  arena.capacity = option<Bytes>(from, "budget_bytes", 1LL << 60);
  arena.addressed = option(from, "addressed", false);
  arena.best_fit = option(from, "best_fit", false);
  arena.align = option<Bytes>(from, "align_bytes", 1);
  arena.small_bytes = option<Bytes>(from, "small_bytes", 0);
  arena.small_capacity = option<Bytes>(from, "small_capacity_bytes", 0);
  RuleSettings& rule = settings.rule;
  rule.kind = rule_kind(option<std::string>(from, "rule", "dtr"));
  rule.neighbours = neighbours(option<std::string>(from, "neighbours", "classes"));
  rule.by_size = option(from, "by_size", true);
  rule.by_staleness = option(from, "by_staleness", true);
  rule.random = option(from, "random", false);
  rule.sample = option(from, "sample", false);
  rule.ignore_small = option(from, "ignore_small", 0.0);
  rule.cost_power = option(from, "cost_power", 1.0);
  rule.size_power = option(from, "size_power", 1.0);
  rule.time_power = option(from, "time_power", 1.0);
  rule.replay_base = option(from, "replay_base", 1.0);
  rule.epsilon = option(from, "epsilon", 0.0);
  rule.groups = option(from, "groups", 1);
  rule.compacts = option(from, "compacts", false);
  rule.foresight = option(from, "foresight", false);
  rule.seed = option<std::uint64_t>(from, "seed", 0);
  rule.swaps = option(from, "swaps", false);
  rule.to_host_per_byte = option(from, "to_host_per_byte", 0.0);
  rule.from_host_per_byte = option(from, "from_host_per_byte", 0.0);
  rule.copy_cost = option(from, "copy_cost", 0.0);
  rule.hides_copies = option(from, "hides_copies", true);
  settings.release = release_of(option<std::string>(from, "release", "evict"));
  settings.keep_replayed = option(from, "keep_replayed", true);
  settings.forget = option(from, "forget", false);
  settings.in_place = option(from, "in_place", false);
  settings.parts = option(from, "parts", 1);
  settings.cost_limit = option(from, "cost_limit", 0.0);
  settings.work_limit = option<std::int64_t>(from, "work_limit", 0);
  return settings;
}

nb::dict counters(const Counters& from, Bytes peak_bytes) {
  nb::dict out;
  out["peak_bytes"] = peak_bytes;
  out["evictions"] = from.evictions;
  out["released"] = from.released;
  out["searches"] = from.searches;
  out["looked_at"] = from.looked_at;
  out["compactions"] = from.compactions;
  out["moved_bytes"] = from.moved_bytes;
  out["fragmentation"] = from.searches ? from.fragmentation_sum / static_cast<double>(from.searches) : 0.0;
  out["fragmentation_max"] = from.fragmentation_max;
  return out;
}

std::vector<std::tuple<int, Id>> pairs(const std::vector<Entry>& journal) {
  std::vector<std::tuple<int, Id>> out;
  out.reserve(journal.size());
  for (const Entry& entry : journal) out.emplace_back(static_cast<int>(entry.act), entry.id);
  return out;
}

nb::dict replay_trace(const nb::dict& columns, const nb::dict& settings, bool settle, bool journal) {
  const Trace trace{
      .tensor_bytes = span<std::int64_t>(columns, "tensor_bytes"),
      .tensor_base = span<std::int32_t>(columns, "tensor_base"),
      .tensor_cheap = span<std::uint8_t>(columns, "tensor_cheap"),
      .op_cost = span<double>(columns, "op_cost"),
      .op_args_at = span<std::int32_t>(columns, "op_args_at"),
      .op_args = span<std::int32_t>(columns, "op_args"),
      .op_outs = span<std::int32_t>(columns, "op_outs"),
      .op_takes_over = span<std::int32_t>(columns, "op_takes_over"),
      .op_again = span<std::uint8_t>(columns, "op_again"),
      .op_elements = span<std::int64_t>(columns, "op_elements"),
      .event_kind = span<std::int32_t>(columns, "event_kind"),
      .event_id = span<std::int32_t>(columns, "event_id"),
  };
  const Settings how = settings_of(settings);
  Report report;
  {
    nb::gil_scoped_release other_threads;
    report = run_trace(trace, how, settle, journal);
  }
  nb::dict out = counters(report.counters, report.peak_bytes);
  constexpr const char* kOutcomes[] = {"done", "infeasible", "thrashing"};
  out["swaps"] = report.counters.swaps;
  out["swapped_bytes"] = report.counters.swapped_bytes;
  out["outcome"] = kOutcomes[static_cast<int>(report.outcome)];
  out["first_cost"] = report.first_cost;
  out["replay_cost"] = report.replay_cost;
  out["wanted_bytes"] = report.wanted_bytes;
  out["held_bytes"] = report.held_bytes;
  out["replays"] = report.replays;
  out["work"] = report.work;
  out["events_done"] = report.events_done;
  out["journal"] = pairs(report.journal);
  return out;
}

// A Rematerializer that follows a running program. Each tensor has its own storage, so their numbers are equal.
class Live {
 public:
  explicit Live(const nb::dict& settings) : machine_(settings_of(settings)) {}

  Id constant(Bytes bytes) {
    return guarded([&] { return machine_.constant(bytes); });
  }
  std::vector<Id> call(double cost, const std::vector<Id>& args, const std::vector<Bytes>& bytes, Id takes_over, Bytes scratch, Bytes elements) {
    std::vector<Out> outs;
    for (Bytes each : bytes) outs.push_back({.bytes = each});
    std::vector<Id> made = guarded([&] { return machine_.call(cost, args, outs, takes_over, true, scratch, elements); });
    for (Id each : made) hold(each);
    std::vector<Entry>& journal = machine_.journal;
    while (!journal.empty() && (journal.back().act == Act::run || journal.back().act == Act::over_write)) journal.pop_back();
    return made;
  }
  void retain(Id tensor) { machine_.retain(tensor); }
  void release(Id tensor) { machine_.release(tensor); }
  void hold(Id tensor) { machine_.cache.lock(storage(tensor)); }
  void unhold(Id tensor) { machine_.cache.unlock(storage(tensor)); }
  void take(Id tensor) {
    retain(tensor);
    hold(tensor);
  }
  void give_back(Id tensor) {
    unhold(tensor);
    release(tensor);
  }
  bool pending() const { return !machine_.journal.empty(); }
  void bring(Id tensor) {
    guarded([&] { machine_.bring(tensor); return 0; });
  }
  void make_room(Bytes bytes) {
    guarded([&] { machine_.make_room(bytes); return 0; });
  }
  std::vector<std::tuple<int, Id>> drain() {
    auto out = pairs(machine_.journal);
    machine_.journal.clear();
    return out;
  }
  nb::dict counted() const {
    nb::dict out = counters(machine_.cache.counters, std::max(machine_.peak, machine_.cache.arena.peak()));
    out["first_cost"] = machine_.first_cost;
    out["replay_cost"] = machine_.replay_cost;
    out["replays"] = machine_.replays;
    out["used_bytes"] = machine_.cache.arena.used();
    out["wanted_bytes"] = wanted_;
    out["held_bytes"] = held_;
    return out;
  }

 private:
  Id storage(Id tensor) const { return machine_.cache.lineage.tensors[tensor].storage; }
  template <typename Body>
  auto guarded(const Body& body) -> decltype(body()) {
    try {
      return body();
    } catch (const Infeasible& error) {
      wanted_ = error.wanted;
      held_ = error.held;
      throw;
    }
  }
  Rematerializer machine_;
  Bytes wanted_ = 0, held_ = 0;
};

}  // namespace

void bind_remat(nb::module_& m) {
  nb::class_<Live>(m, "Rematerializer", "Dynamic rematerialization, simulated alongside a running program; a tensor is a storage.")
      .def(nb::init<const nb::dict&>(), "settings"_a, nb::sig("def __init__(self, settings: dict[str, object]) -> None"))
      .def("constant", &Live::constant, "n_bytes"_a, "Adds a tensor that cannot be recomputed, with one reference.")
      .def("call", &Live::call, "cost"_a, "args"_a, "out_bytes"_a, "takes_over"_a, "scratch_bytes"_a, "elements"_a,
           nb::sig("def call(self, cost: float, args: Sequence[int], out_bytes: Sequence[int], takes_over: int, scratch_bytes: int, elements: int) -> list[int]"),
           "Adds an operator that has run; returns the tensors that it made, each with one reference and one hold. takes_over: argument "
           "that the first one overwrites, or -1. scratch_bytes: workspace of another run. elements: number of output elements if it is "
           "elementwise, else 0.")
      .def("retain", &Live::retain, "tensor"_a, "Adds a reference.")
      .def("release", &Live::release, "tensor"_a, "Removes a reference.")
      .def("hold", &Live::hold, "tensor"_a, "Adds a hold; a held tensor is not evicted.")
      .def("let_go", &Live::unhold, "tensor"_a, "Removes a hold.")
      .def("take", &Live::take, "tensor"_a, "Adds a reference and a hold.")
      .def("give_back", &Live::give_back, "tensor"_a, "Removes a hold and a reference.")
      .def("pending", &Live::pending, "Whether `drain` has events.")
      .def("bring", &Live::bring, "tensor"_a, "Recomputes the tensor if it was evicted.")
      .def("make_room", &Live::make_room, "n_bytes"_a, "Evicts until so many bytes are free.")
      .def("drain", &Live::drain, nb::sig("def drain(self) -> list[tuple[int, int]]"), "Events since the last call: evictions and replays.")
      .def("counted", &Live::counted, nb::sig("def counted(self) -> dict[str, typing.Any]"), "Counters so far.");
  m.def("remat_trace", &replay_trace, "columns"_a, "settings"_a, "settle"_a, "journal"_a,
        nb::sig("def remat_trace(columns: dict[str, NDArray[numpy.generic]], settings: dict[str, object], settle: bool, journal: bool) -> dict[str, typing.Any]"),
        "Runs a trace (columns as in csrc/remat/trace.h) under a budget; returns results, and the journal if requested.");
}
