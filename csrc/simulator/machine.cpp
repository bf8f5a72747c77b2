#include "simulator/machine.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace memtune {
namespace {

struct Interval {
  double start, stop;
};

// What runs on one resource, in order; intervals that touch become one.
class Track {
 public:
  double free_at() const { return free_at_; }

  void add(double start, double stop) {
    busy_s_ += stop - start;
    free_at_ = stop;  // also after an op that takes no time: the next one still comes after it
    if (!intervals_.empty() && start <= intervals_.back().stop) {
      intervals_.back().stop = stop;
    } else if (stop > start) {
      intervals_.push_back({start, stop});
    }
  }

  double busy_s() const { return busy_s_; }

  // Seconds during which both tracks are busy.
  double overlap_s(const Track& other) const {
    double total = 0;
    auto mine = intervals_.begin(), theirs = other.intervals_.begin();
    while (mine != intervals_.end() && theirs != other.intervals_.end()) {
      total += std::max(0.0, std::min(mine->stop, theirs->stop) - std::max(mine->start, theirs->start));
      mine->stop < theirs->stop ? ++mine : ++theirs;
    }
    return total;
  }

 private:
  std::vector<Interval> intervals_;
  double busy_s_ = 0, free_at_ = 0;
};

// Storages by the op that allocates them: `storages[first[op]] .. storages[first[op + 1]]`.
struct Products {
  std::vector<std::int32_t> first, storages;

  explicit Products(const Step& step) : first(step.n_ops() + 1), storages(step.n_storages()) {
    for (const std::int32_t op : step.producer) {
      if (op >= 0) ++first[op + 1];
    }
    for (std::size_t op = 0; op < step.n_ops(); ++op) first[op + 1] += first[op];
    std::vector<std::int32_t> next(first.begin(), first.end());
    for (std::size_t s = 0; s < step.n_storages(); ++s) {
      if (step.producer[s] >= 0) storages[next[step.producer[s]]++] = static_cast<std::int32_t>(s);
    }
  }
};

class Machine {
 public:
  Machine(const Step& step, bool host_computes)
      : step_(step), products_(step), host_computes_(host_computes), written_at_(step.n_storages()), read_until_(step.n_storages()) {}

  void run(bool first, bool last) {
    std::size_t use = 0;
    for (std::size_t op = 0; op < step_.n_ops(); ++op) {
      const std::size_t uses_begin = use;
      while (use < step_.use_op.size() && static_cast<std::size_t>(step_.use_op[use]) == op) ++use;
      const std::uint8_t phase = step_.op_phase[op];
      const bool once_before = phase == kPrologue, once_after = phase == kBoundary || phase == kOptimizer;
      if ((once_before && !first) || (once_after && !last)) continue;
      run_op(op, uses_begin, use);
    }
  }

  Timeline timeline() const {
    Timeline out;
    out.step_s = host_at_;
    for (std::size_t r = 0; r < kResources; ++r) {
      out.step_s = std::max(out.step_s, tracks_[r].free_at());
      out.busy_s[r] = tracks_[r].busy_s();
      const double hidden = r == kCompute ? 0 : tracks_[r].overlap_s(tracks_[kCompute]);
      out.exposed_s[r] = std::max(0.0, out.busy_s[r] - hidden);
    }
    return out;
  }

 private:
  void run_op(std::size_t op, std::size_t uses_begin, std::size_t uses_end) {
    const double issued = host_at_ + step_.op_issue_s[op];
    tracks_[kHostIssue].add(host_at_, issued);
    host_at_ = issued;
    const std::uint8_t resource = step_.op_resource[op];
    // Allocation occupies nothing: it neither waits for a track nor holds one.
    double start = resource == kNothing ? issued : std::max(issued, tracks_[resource].free_at());
    for (std::size_t u = uses_begin; u < uses_end; ++u) {
      const std::int32_t storage = step_.use_storage[u];
      start = std::max(start, written_at_[storage]);
      if (step_.use_mutates[u]) start = std::max(start, read_until_[storage]);
    }
    const double stop = start + (resource == kNothing ? 0 : step_.op_s[op]);
    if (resource != kNothing) tracks_[resource].add(start, stop);
    if (resource == kCompute && host_computes_) host_at_ = stop;
    for (std::int32_t p = products_.first[op]; p < products_.first[op + 1]; ++p) {
      written_at_[products_.storages[p]] = stop;
      read_until_[products_.storages[p]] = 0;  // the storage of the last repetition was another one
    }
    for (std::size_t u = uses_begin; u < uses_end; ++u) {
      const std::int32_t storage = step_.use_storage[u];
      read_until_[storage] = std::max(read_until_[storage], stop);
      if (step_.use_mutates[u]) written_at_[storage] = stop;
    }
  }

  const Step& step_;
  Products products_;
  bool host_computes_;
  double host_at_ = 0;
  std::array<Track, kResources> tracks_;
  std::vector<double> written_at_, read_until_;
};

}  // namespace

Timeline schedule(const Step& step, std::int64_t accumulate, bool host_computes) {
  if (accumulate < 1) throw std::invalid_argument("accumulate must be at least 1");
  Machine machine(step, host_computes);
  for (std::int64_t repetition = 0; repetition < accumulate; ++repetition) {
    machine.run(repetition == 0, repetition == accumulate - 1);
  }
  return machine.timeline();
}

}  // namespace memtune
