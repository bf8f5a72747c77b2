#include "simulator/report.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace memtune {
namespace {

struct Interval {
  double start, stop;
  std::int32_t op;
};

// Seconds of `intervals` during which none of `others` runs; both in order and without overlap among themselves.
double exposed(const std::vector<Interval>& intervals, const std::vector<Interval>& others, std::vector<double>* by_op) {
  double total = 0;
  std::size_t first = 0;
  for (const Interval& each : intervals) {
    double alone = each.stop - each.start;
    while (first < others.size() && others[first].stop <= each.start) ++first;
    for (std::size_t o = first; o < others.size() && others[o].start < each.stop; ++o) {
      alone -= std::min(each.stop, others[o].stop) - std::max(each.start, others[o].start);
    }
    alone = std::max(alone, 0.0);
    total += alone;
    if (by_op != nullptr) (*by_op)[each.op] += alone;
  }
  return total;
}

void measure(const Step& step, std::span<const Task> tasks, ClassTimeline& out) {
  std::array<std::vector<Interval>, kResources> ran;
  for (const Task& task : tasks) {
    out.finish_s = std::max(out.finish_s, task.issued);
    const double issue_s = step.op_issue_s[task.op];
    if (issue_s > 0) ran[kHostIssue].push_back({task.issued - issue_s, task.issued, task.op});
    const std::uint8_t resource = step.op_resource[task.op];
    if (resource == kNothing) continue;
    out.finish_s = std::max(out.finish_s, task.stop);
    if (task.stop > task.start) ran[resource].push_back({task.start, task.stop, task.op});
  }
  out.op_exposed_s.assign(step.n_ops(), 0);
  for (std::size_t r = 0; r < kResources; ++r) {
    // Side streams may overtake, so program order need not be the order of time.
    std::stable_sort(ran[r].begin(), ran[r].end(), [](const Interval& a, const Interval& b) { return a.start < b.start; });
    for (const Interval& each : ran[r]) out.busy_s[r] += each.stop - each.start;
  }
  out.exposed_s[kCompute] = out.busy_s[kCompute];
  for (std::size_t r = kCompute + 1; r < kResources; ++r) {
    out.exposed_s[r] = exposed(ran[r], ran[kCompute], r == kHostIssue ? nullptr : &out.op_exposed_s);
  }
}

// Walks back from what finished last, always to what the start of each part had waited for.
class Path {
 public:
  Path(std::span<const Step> steps, const Graph& graph, bool host_computes)
      : steps_(steps), graph_(graph), host_computes_(host_computes) {}

  std::vector<PathPart> from_the_end() {
    std::int32_t last = kNone;
    bool by_host = false;
    double at = 0;
    for (std::int32_t t = 0; t < static_cast<std::int32_t>(graph_.tasks.size()); ++t) {
      const Task& task = graph_.tasks[t];
      const bool runs = step_of(t).op_resource[task.op] != kNothing;
      if (std::max(task.issued, runs ? task.stop : 0) <= at) continue;
      by_host = !runs || task.issued > task.stop;
      at = by_host ? task.issued : task.stop;
      last = t;
    }
    while (last != kNone) {
      const Task& task = graph_.tasks[last];
      if (!by_host) {
        add(last, false, task.start, task.stop);
        if (task.last_partner != kNone) last = task.last_partner;
        if (graph_.tasks[last].cause != kNone) {
          last = graph_.tasks[last].cause;
          continue;
        }
      }
      const Task& issued = graph_.tasks[last];
      add(last, true, issued.issued - step_of(last).op_issue_s[issued.op], issued.issued);
      // The host came to this op from the one before it, which it may have computed itself.
      by_host = true;
      if (last == graph_.first_task[class_of(last)]) break;
      --last;
      by_host = !(host_computes_ && step_of(last).computes(graph_.tasks[last].op));
    }
    std::reverse(parts_.begin(), parts_.end());
    return std::move(parts_);
  }

 private:
  void add(std::int32_t t, bool host, double start, double stop) {
    if (stop > start) parts_.push_back({static_cast<std::int32_t>(class_of(t)), graph_.tasks[t].op, host, start, stop});
  }

  std::size_t class_of(std::int32_t t) const {
    return std::upper_bound(graph_.first_task.begin(), graph_.first_task.end(), t) - graph_.first_task.begin() - 1;
  }
  const Step& step_of(std::int32_t t) const { return steps_[class_of(t)]; }

  std::span<const Step> steps_;
  const Graph& graph_;
  bool host_computes_;
  std::vector<PathPart> parts_;
};

}  // namespace

Timeline report(std::span<const Step> steps, const Graph& graph, bool host_computes, std::vector<Memory>& memories) {
  Timeline out;
  const std::span<const Task> tasks = graph.tasks;
  for (std::size_t c = 0; c < steps.size(); ++c) {
    ClassTimeline& mine = out.classes.emplace_back();
    static_cast<Footprint&>(mine) = memories[c].footprint();
    mine.storage_stream = memories[c].take_stream();
    measure(steps[c], tasks.subspan(graph.first_task[c], graph.first_task[c + 1] - graph.first_task[c]), mine);
    out.step_s = std::max(out.step_s, mine.finish_s);
  }
  out.critical_path = Path(steps, graph, host_computes).from_the_end();
  return out;
}

}  // namespace memtune
