#include "remat/trace.h"

#include <algorithm>
#include <numeric>

namespace memtune::remat {

namespace {

// When each tensor is used, on the clock of first runs, latest first.
std::vector<std::vector<double>> uses_of(const Trace& trace) {
  std::vector<std::vector<double>> uses(trace.tensor_bytes.size());
  double at = 0;
  for (std::size_t op = 0; op < trace.op_cost.size(); ++op) {
    for (std::int32_t i = trace.op_args_at[op]; i < trace.op_args_at[op + 1]; ++i) uses[trace.op_args[i]].push_back(at);
    at += trace.op_cost[op];
  }
  for (auto& each : uses) std::reverse(each.begin(), each.end());
  return uses;
}

class Player {
 public:
  Player(const Trace& trace, const Settings& settings) : trace_(trace), books_(settings), foresight_(settings.rule.foresight) {
    if (foresight_) books_.cache.next_uses = uses_of(trace);
    books_.all_first_cost = std::accumulate(trace.op_cost.begin(), trace.op_cost.end(), 0.0);
  }

  void play(std::size_t event) {
    const Id id = trace_.event_id[event];
    switch (static_cast<Event>(trace_.event_kind[event])) {
      case Event::constant: books_.constant(trace_.tensor_bytes[id]); ++tensors_; break;
      case Event::call: call(id); break;
      case Event::release: books_.release(id); break;
      case Event::retain: books_.retain(id); break;
      case Event::require: books_.require(id); break;
    }
  }

  Rematerializer& books() { return books_; }

 private:
  void call(Id op) {
    std::vector<Out> outs;
    for (std::int32_t i = 0; i < trace_.op_outs[op]; ++i, ++tensors_)
      outs.push_back({trace_.tensor_bytes[tensors_], trace_.tensor_base[tensors_], trace_.tensor_cheap[tensors_] != 0});
    const auto args = trace_.op_args.subspan(trace_.op_args_at[op], trace_.op_args_at[op + 1] - trace_.op_args_at[op]);
    auto& next = books_.cache.next_uses;
    if (foresight_)
      for (Id arg : args) {
        auto& uses = next[arg];
        while (!uses.empty() && uses.back() <= books_.first_cost) uses.pop_back();
      }
    books_.cache.now = books_.first_cost;
    books_.call(trace_.op_cost[op], {args.begin(), args.end()}, outs, trace_.op_takes_over[op], trace_.op_again[op] != 0, 0,
                trace_.op_elements[op]);
  }

  const Trace& trace_;
  Rematerializer books_;
  bool foresight_;
  Id tensors_ = 0;
};

}  // namespace

Report run_trace(const Trace& trace, const Settings& settings, bool settle, bool keep_journal) {
  Report report;
  Player player(trace, settings);
  Rematerializer& books = player.books();
  try {
    for (std::size_t event = 0; event < trace.event_kind.size(); ++event) {
      player.play(event);
      ++report.events_done;
      if (!keep_journal) books.journal.clear();
    }
    if (settle) books.settle();
  } catch (const Infeasible& error) {
    report.outcome = Outcome::infeasible;
    report.wanted_bytes = error.wanted;
    report.held_bytes = error.held;
  } catch (const Thrashing&) {
    report.outcome = Outcome::thrashing;
  }
  report.first_cost = books.first_cost;
  report.replay_cost = books.replay_cost + books.cache.exposed;
  report.peak_bytes = books.cache.arena.peak();
  report.replays = books.replays;
  report.work = books.work();
  report.counters = books.cache.counters;
  report.journal = std::move(books.journal);
  return report;
}

}  // namespace memtune::remat
