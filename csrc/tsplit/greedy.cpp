#include "tsplit/greedy.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace memtune::tsplit {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void require_rows(std::span<const std::int32_t> rows, std::size_t count, std::int32_t least, const char* what) {
  for (const std::int32_t row : rows) require(row >= least && row < static_cast<std::int64_t>(count), what);
}

// Seconds that compute waits for a copy that may run from `start_s` to `end_s`.
double wait_s(double copy_s, double start_s, double end_s) { return std::max(copy_s - std::max(end_s - start_s, 0.0), 0.0); }

// Seconds that compute waits for each action's copies in one direction of the link, given the actions that are taken.
class Waits {
 public:
  explicit Waits(const Link& link) : link_(link), by_start_(link.action.size()), own_s_(link.action.size()) {
    std::iota(by_start_.begin(), by_start_.end(), 0);
    std::stable_sort(by_start_.begin(), by_start_.end(), [&](std::int32_t a, std::int32_t b) { return link.start_s[a] < link.start_s[b]; });
  }

  // Adds to `seconds` the wait of each action; for taken ones, their current wait.
  void add_to(std::vector<double>& seconds, const std::vector<char>& taken) {
    taken_.clear();
    for (const std::int32_t row : by_start_) {
      if (taken[link_.action[row]]) taken_.push_back(row);
    }
    std::size_t after = 0;  // taken copies that begin no later
    for (const std::int32_t row : by_start_) {
      while (after < taken_.size() && link_.start_s[taken_[after]] <= link_.start_s[row]) ++after;
      own_s_[row] = waits_s(row, after, taken[link_.action[row]]);
    }
    for (std::size_t row = 0; row < own_s_.size();) {
      const std::int32_t action = link_.action[row];
      double sum = 0.0;
      for (; row < own_s_.size() && link_.action[row] == action; ++row) sum += own_s_[row];
      seconds[action] += sum;
    }
  }

 private:
  double waits_s(std::int32_t row, std::size_t after, bool is_taken) const {
    const double start = link_.start_s[row], following = after < taken_.size() ? link_.start_s[taken_[after]] : kNever;
    double own = wait_s(link_.copy_s[row], start, std::min(link_.end_s[row], following));
    if (after > 0 && !is_taken) {  // the one before has to be over earlier
      const std::int32_t before = taken_[after - 1];
      const double begins = link_.start_s[before], took = link_.copy_s[before], until = std::min(link_.end_s[before], following);
      own += wait_s(took, begins, std::min(until, start)) - wait_s(took, begins, until);
    }
    return own;
  }

  const Link& link_;
  std::vector<std::int32_t> by_start_, taken_;
  std::vector<double> own_s_;
};

// The timeline under what has been decided so far.
class State {
 public:
  std::vector<std::int64_t> live;
  std::vector<std::int32_t> choice;

  explicit State(const Problem& problem)
      : live(problem.live_bytes.begin(), problem.live_bytes.end()), choice(problem.part_of.size()), problem_(problem),
        taken_(problem.tensor.size()), given_up_(problem.tensor.size()), freed_(problem.tensor.size()),
        seconds_(problem.tensor.size()), links_{Waits(problem.out), Waits(problem.back)}, first_free_(problem.tensor.size() + 1) {
    for (const std::int32_t action : problem.free_action) ++first_free_[action + 1];
    std::partial_sum(first_free_.begin(), first_free_.end(), first_free_.begin());
  }

  // The action with the least added time per byte freed in `moment`, of which `excess_bytes` count; -1: none.
  std::int64_t cheapest(std::int32_t moment, double excess_bytes) {
    find_freed(moment);
    find_seconds();
    const std::vector<double> freed_now = replaced(freed_), seconds_now = replaced(seconds_);
    std::int64_t best = -1;
    double best_per_byte = 0.0, best_gain = 0.0;
    for (std::size_t a = 0; a < taken_.size(); ++a) {
      const std::int32_t tensor = problem_.tensor[a], whole = problem_.part_of[tensor];
      const double gain = freed_[a] - freed_now[tensor];
      if (gain <= 0 || taken_[a] || given_up_[a] || (whole >= 0 && choice[whole] > 0)) continue;
      // Relative to what its tensor has now: a better action may take a taken one's place.
      const double per_byte = std::max(seconds_[a] - seconds_now[tensor], 0.0) / std::min(gain, excess_bytes);
      if (best < 0 || per_byte < best_per_byte || (per_byte == best_per_byte && gain > best_gain)) {
        best = static_cast<std::int64_t>(a);
        best_per_byte = per_byte;
        best_gain = gain;
      }
    }
    return best;
  }

  // Decide so, in place of what its tensor, or the parts of it, had.
  void take(std::int64_t action) {
    const std::int32_t tensor = problem_.tensor[action];
    for (std::size_t other = 0; other < taken_.size(); ++other) {
      const std::int32_t owner = problem_.tensor[other];
      if (!taken_[other] || (owner != tensor && problem_.part_of[owner] != tensor)) continue;
      change(other, 1);
      taken_[other] = false;
      // Never taken again, so the loop ends: each round takes a new action.
      given_up_[other] = true;
      choice[owner] = 0;
    }
    change(action, -1);
    taken_[action] = true;
    choice[tensor] = problem_.number[action];
  }

 private:
  void find_freed(std::int32_t moment) {
    std::fill(freed_.begin(), freed_.end(), 0.0);
    for (std::size_t row = 0; row < problem_.first.size(); ++row) {
      if (problem_.first[row] <= moment && moment < problem_.stop[row]) {
        freed_[problem_.free_action[row]] += static_cast<double>(problem_.n_bytes[row]);
      }
    }
  }

  // Time that each action adds to those taken; for taken ones, their current time.
  void find_seconds() {
    std::copy(problem_.more_s.begin(), problem_.more_s.end(), seconds_.begin());
    for (Waits& link : links_) link.add_to(seconds_, taken_);
  }

  // By tensor: of `values`, what an action of it would replace.
  std::vector<double> replaced(const std::vector<double>& values) const {
    std::vector<double> mine(choice.size());
    for (std::size_t a = 0; a < taken_.size(); ++a) {
      if (taken_[a]) mine[problem_.tensor[a]] = values[a];  // one action a tensor
    }
    std::vector<double> found = mine;
    for (std::size_t t = 0; t < mine.size(); ++t) {
      if (problem_.part_of[t] >= 0) found[problem_.part_of[t]] += mine[t];
    }
    return found;
  }

  void change(std::size_t action, std::int64_t sign) {
    for (std::int32_t row = first_free_[action]; row < first_free_[action + 1]; ++row) {
      for (std::int32_t moment = problem_.first[row]; moment < problem_.stop[row]; ++moment) live[moment] += sign * problem_.n_bytes[row];
    }
  }

  const Problem& problem_;
  std::vector<char> taken_, given_up_;
  std::vector<double> freed_, seconds_;
  Waits links_[2];
  std::vector<std::int32_t> first_free_;  // by action: its first row of what is freed
};

void check(const Problem& problem) {
  const std::size_t actions = problem.tensor.size(), moments = problem.live_bytes.size(), frees = problem.free_action.size();
  require(problem.number.size() == actions && problem.more_s.size() == actions, "columns of actions must have the same length");
  require(problem.first.size() == frees && problem.stop.size() == frees && problem.n_bytes.size() == frees,
          "columns of what is freed must have the same length");
  require_rows(problem.tensor, problem.part_of.size(), 0, "an action is of a tensor that is not there");
  require_rows(problem.part_of, problem.part_of.size(), -1, "a tensor is part of one that is not there");
  require_rows(problem.free_action, actions, 0, "bytes are freed by an action that is not there");
  require_rows(problem.first, moments + 1, 0, "bytes are freed in a moment that is not there");
  require_rows(problem.stop, moments + 1, 0, "bytes are freed in a moment that is not there");
  require(std::is_sorted(problem.free_action.begin(), problem.free_action.end()), "what is freed must be sorted by action");
  for (const Link* link : {&problem.out, &problem.back}) {
    const std::size_t copies = link->action.size();
    require(link->start_s.size() == copies && link->end_s.size() == copies && link->copy_s.size() == copies,
            "columns of copies must have the same length");
    require_rows(link->action, actions, 0, "a copy is of an action that is not there");
    require(std::is_sorted(link->action.begin(), link->action.end()), "copies must be sorted by action");
  }
}

}  // namespace

std::vector<std::int32_t> greedy(const Problem& problem, std::int64_t budget_bytes, bool beyond) {
  check(problem);
  State state(problem);
  while (!state.live.empty()) {
    const auto peak = std::max_element(state.live.begin(), state.live.end());  // the first one
    // Algorithm 2 of TSPLIT: the current peak alone decides what is freed next.
    const std::int64_t excess = *peak - budget_bytes;
    if (excess <= 0) break;
    const auto moment = static_cast<std::int32_t>(peak - state.live.begin());
    const std::int64_t action = state.cheapest(moment, beyond ? kNever : static_cast<double>(excess));
    if (action < 0) break;
    state.take(action);
  }
  return std::move(state.choice);
}

}  // namespace memtune::tsplit
