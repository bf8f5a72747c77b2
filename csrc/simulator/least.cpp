#include "simulator/least.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>

#include "simulator/graph.h"

namespace memtune {
namespace {

// Of more repetitions than this the first ones and the last one are gone through; between them each stream goes on as before.
constexpr std::int32_t kWhole = 4;

bool on_cores(std::uint8_t resource) {
  return resource == kCompute || resource == kHostThreads || resource == kHostToDevice || resource == kDeviceToHost;
}

// How far a class has come.
struct State {
  double host = 0;
  // When all work of shared cores can be done that the host has issued, which issues nothing while it waits for compute: what is put
  // off while compute runs is not saved. So it grows by all work that is issued, and to the start of each op of compute.
  double cores = 0;
  std::array<double, kQueues> streams{};  // until when each is busy
  std::array<double, kQueues> issued{};   // work of the cores other than compute, by stream
  std::array<double, kQueues> known{};    // of that, what compute has waited for
};

// `to` as much later as `now` is than `before`, `times` over; the smaller of the last two differences counts.
void go_on(State& to, const State& now, const State& before, const State& first, double times) {
  const auto more = [times](double& value, double c, double b, double a) {
    // The smaller difference keeps it a lower bound where repetitions are not yet steady.
    value += times * std::max(0.0, std::min(c - b, b - a));
  };
  more(to.host, now.host, before.host, first.host);
  more(to.cores, now.cores, before.cores, first.cores);
  for (std::size_t q = 0; q < kQueues; ++q) {
    more(to.streams[q], now.streams[q], before.streams[q], first.streams[q]);
    more(to.issued[q], now.issued[q], before.issued[q], first.issued[q]);
    more(to.known[q], now.known[q], before.known[q], first.known[q]);
  }
}

// One class of ranks, op by op in program order: when each op has finished at the earliest.
class Clocks {
 public:
  Clocks(const Step& step, const Place& place, const Rules& rules)
      : step_(step), host_computes_(rules.host_computes), shares_cores_(rules.shares_cores && rules.host_computes),
        accumulate_(static_cast<std::int32_t>(rules.accumulate)), uses_(step.use_op, step.n_ops()),
        products_(step.producer, step.n_ops()), ends_(step.ends()), kept_(kept_by_transfer(step, ends_)), finish_(step.n_ops()),
        done_(shares_cores_ ? step.n_ops() : 0), freed_at_(step.n_ops(), kNone), writer_(step.n_storages(), kNone),
        reader_(step.n_storages(), kNone) {
    slower_.fill(1);
    slower_[kHostToDevice] = slower_[kDeviceToHost] = place.ranks_on_root;
    skip();
  }

  bool is_done() const { return repetition_ == accumulate_; }
  std::size_t op() const { return op_; }
  std::int32_t repetition() const { return repetition_; }
  double finish_s() const { return std::max(finish_s_, shares_cores_ ? at_.cores : 0); }

  // When the op that is next may start; asked once.
  double ready() {
    double at = at_.host + step_.op_issue_s[op_];
    const bool computes = step_.computes(op_);
    const auto wait = [&](std::int32_t before) {
      if (before == kNone) return;
      at = std::max(at, finish_[before]);
      if (shares_cores_ && computes) learn(step_.queue(before), done_[before]);
    };
    for (const std::int32_t use : uses_[op_]) {
      const std::int32_t storage = step_.use_storage[use];
      // An output is no argument.
      if (step_.producer[storage] == static_cast<std::int32_t>(op_)) continue;
      wait(writer_[storage]);
      // Write after read: a reader on another stream must have finished.
      if (step_.use_mutates[use]) wait(reader_[storage]);
    }
    if (computes) {
      for (const Run& transfer : pending_) {
        at = std::max(at, transfer.finish);
        learn(transfer.queue, transfer.done);
      }
      pending_.clear();
      // All work known to be done has taken its time on the cores by then.
      if (shares_cores_) at = std::max(at, at_.cores - put_off());
    }
    if (step_.op_resource[op_] != kNothing) at = std::max(at, at_.streams[step_.queue(op_)]);
    return std::max(at, fetched_from());
  }

  // Runs the op that is next.
  void run(double start, double seconds) {
    const auto op = static_cast<std::int32_t>(op_);
    const bool computes = step_.computes(op_), nothing = step_.op_resource[op_] == kNothing;
    const double takes = nothing ? 0 : seconds * slower_[step_.op_resource[op_]], stop = start + takes;
    at_.host += step_.op_issue_s[op_];
    finish_s_ = std::max({finish_s_, at_.host, nothing ? 0 : stop});
    finish_[op_] = stop;
    if (!nothing) at_.streams[step_.queue(op_)] = stop;
    if (shares_cores_ && !nothing) work(start, takes);
    if (computes) {
      if (host_computes_) at_.host = stop;
      last_compute_ = stop;
    }
    touch(op, !computes && !nothing);
    release_transfer();
    ++op_;
    skip();
  }

 private:
  // One run of an op outside the compute stream: its stream, its finish, and the work of the cores on that stream until then.
  struct Run {
    std::size_t queue;
    double finish, done;
  };

  double finish_of(std::int32_t op) const { return op == kNone ? 0 : finish_[op]; }

  void learn(std::size_t queue, double done) { at_.known[queue] = std::max(at_.known[queue], done); }

  // Compute goes on past the end of what is moved when that is over. Noted as it is now: the transfer may run again before.
  void release_transfer() {
    const std::int32_t transfer = std::exchange(freed_at_[op_], kNone);
    if (transfer == kNone) return;
    pending_.push_back({step_.queue(transfer), finish_[transfer], shares_cores_ ? done_[transfer] : 0});
  }

  // Work of the cores that is not known to be done.
  double put_off() const {
    double left = 0;
    for (std::size_t q = 0; q < kQueues; ++q) left += at_.issued[q] - at_.known[q];
    return left;
  }

  void work(double start, double takes) {
    const std::uint8_t resource = step_.op_resource[op_];
    if (step_.computes(op_)) {
      at_.cores = on_cores(resource) ? std::max(at_.cores, start) + takes : std::max(at_.cores, start + takes);
      done_[op_] = 0;
    } else if (on_cores(resource)) {
      at_.cores += takes;
      done_[op_] = at_.issued[step_.queue(op_)] += takes;
    }
  }

  // When compute has come to the place from which the op may run ahead; notes that place.
  double fetched_from() {
    const std::size_t depth = step_.op_prefetch[op_];
    if (depth == 0) return 0;
    const bool own = step_.op_stream[op_] == kOwnStream;
    std::vector<double>& places = places_[own ? std::size_t{kStreams} + step_.op_resource[op_] : step_.op_stream[op_]];
    places.push_back(last_compute_);
    return places.size() < depth ? 0 : places[places.size() - depth];
  }

  // To the next op of this repetition, or to the next repetition.
  void skip() {
    for (; repetition_ < accumulate_; ++repetition_, op_ = 0) {
      while (op_ < step_.n_ops() && !runs_in(step_, op_, repetition_, accumulate_)) ++op_;
      if (op_ < step_.n_ops()) return;
      // Steady by now; the last one differs (gradients are averaged) and is gone through.
      if (repetition_ == kWhole - 2 && accumulate_ > kWhole) leap();
      before_[0] = before_[1];
      before_[1] = at_;
    }
  }

  // Later accesses to the storages that the op uses wait for it.
  void touch(std::int32_t op, bool moves) {
    for (const std::int32_t storage : products_[op]) {
      reader_[storage] = kNone;
      writer_[storage] = op;
      if (moves) move(op, storage);
    }
    for (const std::int32_t use : uses_[op]) {
      const std::int32_t storage = step_.use_storage[use];
      if (step_.use_mutates[use]) {
        writer_[storage] = op;
        reader_[storage] = kNone;
      } else if (finish_of(reader_[storage]) <= finish_[op]) {
        reader_[storage] = op;
      }
      if (moves) move(op, storage);
    }
  }

  void move(std::int32_t op, std::int32_t storage) {
    const std::int32_t end = ends_[storage];
    if (kept_[storage] || end < op || static_cast<std::size_t>(end) >= step_.n_ops()) return;
    if (finish_of(freed_at_[end]) <= finish_[op]) freed_at_[end] = op;
  }

  void leap() {
    const State now = at_;
    const double times = accumulate_ - kWhole;
    go_on(at_, now, before_[1], before_[0], times);
    for (std::size_t op = 0; op < step_.n_ops(); ++op) {
      if (!runs_in(step_, op, 1, accumulate_)) continue;
      const std::size_t queue = step_.queue(op);
      finish_[op] += at_.streams[queue] - now.streams[queue];
      if (shares_cores_ && done_[op] > 0) done_[op] += at_.issued[queue] - now.issued[queue];
    }
    for (Run& transfer : pending_) {
      transfer.finish += at_.streams[transfer.queue] - now.streams[transfer.queue];
      transfer.done += at_.issued[transfer.queue] - now.issued[transfer.queue];
    }
    const double compute = at_.streams[kCompute] - now.streams[kCompute];
    for (auto& places : places_) {
      for (double& place : places) place += compute;
    }
    last_compute_ += compute;
    repetition_ += accumulate_ - kWhole;
  }

  const Step& step_;
  bool host_computes_, shares_cores_;
  std::int32_t accumulate_;
  ByKey uses_, products_;
  std::vector<std::int32_t> ends_;
  std::vector<std::uint8_t> kept_;
  std::vector<double> finish_;           // by op, of its last run
  std::vector<double> done_;            // by op on the cores other than compute: the work of its stream until it has finished
  std::vector<std::int32_t> freed_at_;  // by op: the last transfer to finish of the storages that are freed there
  std::vector<Run> pending_;            // transfers that compute waits for next
  std::vector<std::int32_t> writer_, reader_;  // by storage: who wrote it last; of those that read it since, the last to finish
  std::array<double, kResources> slower_{};
  std::array<std::vector<double>, std::size_t{kStreams} + kResources> places_;  // of fetches: when compute has come there
  State at_;
  std::array<State, 2> before_{};  // at the ends of the last repetitions
  std::size_t op_ = 0;
  std::int32_t repetition_ = 0;
  double last_compute_ = 0, finish_s_ = 0;
};

// Classes that meet: each goes on to its next matched op, and those of which all are there start together.
class Meeting {
 public:
  Meeting(std::span<const Step> steps, std::vector<Clocks>& clocks) : steps_(steps), clocks_(clocks) {
    for (const Step& step : steps) {
      for (std::size_t op = 0; op < step.n_ops(); ++op) members_[number(step, op)] += number(step, op) != 0;
    }
  }

  void run() {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t c = 0; c < clocks_.size(); ++c) again |= go_on(c);
      for (std::size_t c = 0; c < clocks_.size() && !again; ++c) {  // each waits for another: one does not wait
        if (!waits_[c]) continue;
        start(c, groups_[key(c)].ready, seconds(c));
        again = true;
      }
    }
  }

 private:
  struct Group {
    std::vector<std::size_t> classes;
    double ready = 0, seconds = 0;
  };

  static std::int32_t number(const Step& step, std::size_t op) { return step.op_resource[op] == kNothing ? 0 : step.op_match[op]; }
  double seconds(std::size_t c) const { return steps_[c].op_s[clocks_[c].op()]; }
  std::pair<std::int32_t, std::int32_t> key(std::size_t c) const {
    return {number(steps_[c], clocks_[c].op()), clocks_[c].repetition()};
  }

  void start(std::size_t c, double at, double seconds) {
    waits_[c] = false;
    clocks_[c].run(at, seconds);
  }

  bool go_on(std::size_t c) {
    bool any = false;
    while (!clocks_[c].is_done() && !waits_[c]) {
      any = true;
      const auto met = key(c);
      const double ready = clocks_[c].ready();
      if (met.first == 0) {
        start(c, ready, seconds(c));
        continue;
      }
      Group& group = groups_[met];
      group.classes.push_back(c);
      group.ready = std::max(group.ready, ready);
      // As in the machine: all start with the last one, and take as long as the slowest.
      group.seconds = std::max(group.seconds, seconds(c));
      waits_[c] = true;
      if (static_cast<std::int32_t>(group.classes.size()) < members_[met.first]) continue;
      for (const std::size_t each : group.classes) {
        if (waits_[each] && key(each) == met) start(each, group.ready, group.seconds);
      }
    }
    return any;
  }

  std::span<const Step> steps_;
  std::vector<Clocks>& clocks_;
  std::map<std::int32_t, std::int32_t> members_;  // of a match, by its number
  std::map<std::pair<std::int32_t, std::int32_t>, Group> groups_;
  std::vector<bool> waits_ = std::vector<bool>(clocks_.size());
};

}  // namespace

std::vector<double> least_s(std::span<const Step> steps, std::span<const Place> places, const Rules& rules) {
  if (places.size() != steps.size()) throw std::invalid_argument("every rank class needs a place");
  std::vector<Clocks> clocks;
  clocks.reserve(steps.size());
  for (std::size_t c = 0; c < steps.size(); ++c) clocks.emplace_back(steps[c], places[c], rules);
  if (steps.size() > 1) {
    Meeting(steps, clocks).run();
  } else {
    for (Clocks& each : clocks) {
      while (!each.is_done()) {
        const double ready = each.ready();
        each.run(ready, steps[0].op_s[each.op()]);
      }
    }
  }
  std::vector<double> found;
  for (const Clocks& each : clocks) found.push_back(each.finish_s());
  return found;
}

}  // namespace memtune
