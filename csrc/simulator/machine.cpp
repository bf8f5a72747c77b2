#include "simulator/machine.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "simulator/graph.h"
#include "simulator/memory.h"
#include "simulator/report.h"

namespace memtune {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A device resource: what runs on it, or holds it until the classes it is matched with have come.
struct Slot {
  std::int32_t task = kNone;
  std::int32_t last = kNone;  // what ran on it before
  bool runs = false;
  double finish = kNever, rate = 1;
};

// A stream: its tasks in order.
struct Queue {
  std::vector<std::int32_t> tasks;
  std::size_t next = 0;
  std::int32_t last = kNone;  // the task before the next one, once it has started
};

// One class of ranks: its host and its device.
struct Rank {
  std::int32_t next_task = 0, end_task = 0;
  double host_at = 0;               // since when the host has been issuing its next task
  std::int32_t host_waits = kNone;  // the task that the host itself computes
  std::array<Slot, kNothing> slots{};
  std::array<Queue, kQueues> queues{};
};

// By op whether it uses device memory.
std::vector<bool> uses_device(const Step& step) {
  std::vector<bool> found(step.n_ops());
  for (std::size_t u = 0; u < step.use_op.size(); ++u) {
    if (step.tier[step.use_storage[u]] == kDevice) found[step.use_op[u]] = true;
  }
  for (std::size_t s = 0; s < step.n_storages(); ++s) {
    if (step.tier[s] == kDevice && step.producer[s] >= 0) found[step.producer[s]] = true;
  }
  return found;
}

// The rate of a copy that waits for others: almost zero, so that its end is finite.
constexpr double kWaits = 1e-9;

class Machine {
 public:
  Machine(std::span<const Step> steps, std::span<const Place> places, const Rules& rules)
      : steps_(steps), places_(places), rules_(rules), graph_(steps, rules.accumulate) {
    for (std::size_t c = 0; c < steps.size(); ++c) {
      ranks_.push_back({.next_task = graph_.first_task[c], .end_task = graph_.first_task[c + 1]});
      memories_.emplace_back(steps[c], rules.allocator, rules.accumulate, rules.host_computes);
      for (std::int32_t t = graph_.first_task[c]; t < graph_.first_task[c + 1]; ++t) {
        const std::int32_t op = graph_.tasks[t].op;
        if (steps[c].op_resource[op] != kNothing) ranks_[c].queues[steps[c].queue(op)].tasks.push_back(t);
      }
    }
    rates_vary_ = rules.link_slowdown > 0 || rules.shares_cores || steps.size() > 1 || rules.link_of_root[0] > 0;
    if (rules.link_of_root[0] > 0) {
      for (const Step& step : steps) on_root_.push_back(uses_device(step));
    }
    for (const Place& place : places) rates_vary_ |= place.ranks_on_root > 1;
  }

  Timeline run() {
    for (double next = 0; next != kNever; next = next_event()) {
      now_ = next;
      // Ends first: what finishes at this moment lets others start at the same moment.
      finish_due();
      settle();
      if (rates_vary_) set_rates();
    }
    for (std::size_t c = 0; c < ranks_.size(); ++c) check_done(c);
    return report(steps_, graph_, rules_.host_computes, memories_);
  }

 private:
  double next_event() const {
    double next = kNever;
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      const Rank& rank = ranks_[c];
      if (rank.host_waits == kNone && rank.next_task < rank.end_task) next = std::min(next, issue_time(c));
      for (const Slot& slot : rank.slots) next = std::min(next, slot.finish);
    }
    return next;
  }

  double issue_time(std::size_t c) const {
    return ranks_[c].host_at + steps_[c].op_issue_s[graph_.tasks[ranks_[c].next_task].op];
  }

  void finish_due() {
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      for (Slot& slot : ranks_[c].slots) {
        if (slot.finish > now_) continue;
        const std::int32_t task = slot.task;
        slot = {.last = task};
        finish(c, task);
      }
    }
  }

  // Everything that can happen at this moment: hosts issue, ops start.
  void settle() {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t c = 0; c < ranks_.size(); ++c) {
        again |= issue(c);
        again |= start_ready(c);
      }
    }
  }

  bool issue(std::size_t c) {
    Rank& rank = ranks_[c];
    bool any = false;
    // The host runs ahead of the device without limit, as CUDA's queue lets it in practice.
    while (rank.host_waits == kNone && rank.next_task < rank.end_task && issue_time(c) <= now_) {
      rank.host_at = issue_time(c);
      const std::int32_t t = rank.next_task++;
      Task& task = graph_.tasks[t];
      task.issued = rank.host_at;
      task.is_issued = any = true;
      // Python allocates when it issues: memory is taken before the device gets there.
      memories_[c].issued(task.op, task.repetition);
      const bool nothing = steps_[c].op_resource[task.op] == kNothing;
      // On a CPU the host itself runs the op, and issues nothing meanwhile.
      if (rules_.host_computes && steps_[c].computes(task.op)) {
        rank.host_waits = t;
      } else {
        memories_[c].passed(task.op, task.repetition);
      }
      if (nothing && task.waits == 0) allocate(c, t);
    }
    return any;
  }

  bool start_ready(std::size_t c) {
    Rank& rank = ranks_[c];
    bool any = false;
    // Side streams first: they have priority over the compute stream for a resource.
    for (std::size_t q = kQueues; q-- > 0;) {
      Queue& queue = rank.queues[q];
      if (queue.next == queue.tasks.size()) continue;
      const std::int32_t t = queue.tasks[queue.next];
      Task& task = graph_.tasks[t];
      if (!task.is_issued || task.waits > 0 || (queue.last != kNone && !graph_.tasks[queue.last].is_done)) continue;
      Slot& slot = rank.slots[steps_[c].op_resource[task.op]];
      // One op at a time per resource, whichever stream it comes from.
      if (slot.task != kNone) continue;
      slot.task = t;
      task.cause = last_of(task, queue.last, slot.last);
      queue.last = t;
      ++queue.next;
      any = true;
      if (task.match == kNone) {
        begin(c, t, steps_[c].op_s[task.op]);
      } else {
        meet(graph_.matches[task.match], t);
      }
    }
    return any;
  }

  void meet(Match& match, std::int32_t last) {
    // A collective begins when its last class has come; the others hold their link meanwhile.
    if (++match.arrived < static_cast<std::int32_t>(match.tasks.size())) return;
    double longest = 0;
    for (const std::int32_t t : match.tasks) longest = std::max(longest, steps_[class_of(t)].op_s[graph_.tasks[t].op]);
    for (const std::int32_t t : match.tasks) {
      graph_.tasks[t].last_partner = last;
      begin(class_of(t), t, longest);
    }
  }

  void begin(std::size_t c, std::int32_t t, double seconds) {
    Task& task = graph_.tasks[t];
    Slot& slot = ranks_[c].slots[steps_[c].op_resource[task.op]];
    task.start = now_;
    slot.runs = true;
    slot.finish = now_ + seconds;
  }

  // An op that only allocates takes no time and needs no resource.
  void allocate(std::size_t c, std::int32_t t) {
    graph_.tasks[t].start = now_;
    graph_.tasks[t].cause = last_of(graph_.tasks[t], kNone, kNone);
    finish(c, t);
  }

  void finish(std::size_t c, std::int32_t first) {
    std::vector<std::int32_t>& done = done_;
    done.assign(1, first);
    while (!done.empty()) {
      const std::int32_t t = done.back();
      done.pop_back();
      Task& task = graph_.tasks[t];
      task.stop = now_;
      task.is_done = true;
      memories_[c].finished(task.op, task.repetition);
      if (ranks_[c].host_waits == t) {
        ranks_[c].host_waits = kNone;
        ranks_[c].host_at = now_;
        memories_[c].passed(task.op, task.repetition);
      }
      for (std::int32_t e = task.first_edge; e != kNone; e = graph_.edges[e].next) {
        Task& after = graph_.tasks[graph_.edges[e].to];
        after.last_waited = t;
        if (--after.waits > 0 || !after.is_issued || steps_[c].op_resource[after.op] != kNothing) continue;
        after.start = now_;
        after.cause = t;
        done.push_back(graph_.edges[e].to);
      }
    }
  }

  // Of all that `task` had to wait for on the device what finished last; kNone where the host came later.
  std::int32_t last_of(const Task& task, std::int32_t before_in_queue, std::int32_t before_on_resource) const {
    std::int32_t last = kNone;
    double at = task.issued;
    for (const std::int32_t t : {task.last_waited, before_in_queue, before_on_resource}) {
      if (t == kNone || graph_.tasks[t].stop <= at) continue;
      last = t;
      at = graph_.tasks[t].stop;
    }
    return last;
  }

  void set_rates() {
    for (std::size_t c = 0; c < ranks_.size(); ++c) {
      auto& slots = ranks_[c].slots;
      // A collective's kernels take multiprocessors (on CPU: cores) from compute.
      const bool links = slots[kIntraLink].runs || slots[kInterLink].runs;
      const double during_link = links ? 1 / (1 + rules_.link_slowdown) : 1;
      // A link that uses cores takes them from all that runs on these.
      const double cores = part_of_cores(slots) * (rules_.shares_cores ? during_link : 1);
      set_rate(slots[kCompute], rules_.shares_cores ? cores : during_link);
      set_rate(slots[kHostThreads], cores);
      for (const Resource copy : {kHostToDevice, kDeviceToHost}) {
        if (slots[copy].runs) set_rate(slots[copy], copies(c, copy) ? cores * copy_rate(c, copy) : kWaits);
      }
      if (link_on_root(c)) set_rate(slots[kIntraLink], link_rate(c));
    }
  }

  double part_of_cores(const std::array<Slot, kNothing>& slots) const {
    if (!rules_.shares_cores) return 1;
    const auto runs = [&](Resource each) { return int{slots[each].runs}; };
    return 1.0 / std::max(runs(kCompute) + runs(kHostThreads) + runs(kHostToDevice) + runs(kDeviceToHost), 1);
  }

  // Transfers in flight in one direction behind the root of a class.
  struct Flows {
    std::int32_t copies = 0, links = 0;
  };

  Flows flows(std::size_t c, Resource copy) const {
    Flows found;
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
      if (places_[other].root != places_[c].root) continue;
      if (copies(other, copy)) found.copies += places_[other].ranks_on_root;
      if (link_on_root(other)) found.links += places_[other].ranks_on_root;
    }
    return found;
  }

  // The part of a root's rate that a link has in one direction: an even one, and no more than it can take.
  double link_share(const Flows& flows, Resource copy) const {
    return std::min(rules_.link_of_root[copy == kDeviceToHost], 1.0 / std::max(flows.copies + flows.links, 1));
  }

  double copy_rate(std::size_t c, Resource copy) const {
    const Flows found = flows(c, copy);
    return (1 - found.links * link_share(found, copy)) / std::max(found.copies, 1);
  }

  // As fast as the slower direction, and as the slowest of the classes that the op is matched with.
  double link_rate(std::size_t c) const {
    const std::int32_t task = ranks_[c].slots[kIntraLink].task, match = graph_.tasks[task].match;
    if (match == kNone) return rate_on_root(c);
    double slowest = 1;
    for (const std::int32_t t : graph_.matches[match].tasks) slowest = std::min(slowest, rate_on_root(class_of(t)));
    return slowest;
  }

  double rate_on_root(std::size_t c) const {
    double slower = 1;
    for (const Resource copy : {kHostToDevice, kDeviceToHost}) {
      slower = std::min(slower, link_share(flows(c, copy), copy) / rules_.link_of_root[copy == kDeviceToHost]);
    }
    return slower;
  }

  bool copies(std::size_t c, Resource copy) const {
    return ranks_[c].slots[copy].runs && (!rules_.serial_copies || is_next(c, copy));
  }

  bool link_on_root(std::size_t c) const {
    const Slot& slot = ranks_[c].slots[kIntraLink];
    return !on_root_.empty() && slot.runs && on_root_[c][graph_.tasks[slot.task].op];
  }

  // Of the classes behind one root the one whose copy began to wait first; of several at once the first one.
  bool is_next(std::size_t c, Resource copy) const {
    const double mine = began(c, copy);
    for (std::size_t other = 0; other < ranks_.size(); ++other) {
      if (other == c || places_[other].root != places_[c].root || !ranks_[other].slots[copy].runs) continue;
      const double theirs = began(other, copy);
      if (theirs < mine || (theirs == mine && other < c)) return false;
    }
    return true;
  }

  double began(std::size_t c, Resource copy) const { return graph_.tasks[ranks_[c].slots[copy].task].start; }

  void set_rate(Slot& slot, double rate) {
    if (!slot.runs || slot.rate == rate) return;
    // The work left is the same; only the time that it takes changes.
    slot.finish = now_ + (slot.finish - now_) * slot.rate / rate;
    slot.rate = rate;
  }

  std::size_t class_of(std::int32_t t) const {
    return std::upper_bound(graph_.first_task.begin(), graph_.first_task.end(), t) - graph_.first_task.begin() - 1;
  }

  void check_done(std::size_t c) const {
    for (std::int32_t t = graph_.first_task[c]; t < graph_.first_task[c + 1]; ++t) {
      if (graph_.tasks[t].is_done) continue;
      throw std::invalid_argument("op " + std::to_string(graph_.tasks[t].op) + " of rank class " + std::to_string(c) +
                                  " waits forever: matched ops are in another order elsewhere, or streams wait for each other");
    }
  }

  std::span<const Step> steps_;
  std::span<const Place> places_;
  Rules rules_;
  Graph graph_;
  std::vector<Rank> ranks_;
  std::vector<Memory> memories_;
  std::vector<std::vector<bool>> on_root_;  // by class and op: an op of a link takes from the root; empty where none does
  std::vector<std::int32_t> done_;
  double now_ = 0;
  bool rates_vary_ = false;
};

}  // namespace

Timeline schedule(std::span<const Step> steps, std::span<const Place> places, const Rules& rules) {
  if (places.size() != steps.size()) throw std::invalid_argument("every rank class needs a place");
  if (!(rules.link_slowdown >= 0)) throw std::invalid_argument("link_slowdown must not be negative");
  const auto [up, down] = rules.link_of_root;
  if (!(up >= 0 && up <= 1 && down >= 0 && down <= 1) || (up > 0) != (down > 0)) {
    throw std::invalid_argument("link_of_root must be two parts of a root, both 0 or neither");
  }
  return Machine(steps, places, rules).run();
}

}  // namespace memtune
