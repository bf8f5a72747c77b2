#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "layout/heuristic.h"

namespace memtune::layout {

namespace {

constexpr std::int64_t kMostCells = 20'000'000;  // sections of all buffers: beyond, one evaluation takes too long
constexpr std::int32_t kStride = 32;             // buffers between two kept skylines
constexpr double kWarm = 0.03, kCold = 0.0005;   // temperatures as a share of the height

// An order of buffers, each of which rests on the skyline that those before it make.
class Skyline {
 public:
  Skyline(const Instance& instance, std::vector<std::int32_t> order)
      : order(std::move(order)), offset(instance.n()), below(instance.n()), instance_(instance) {
    top_.resize(instance.n_sections);
    last_.resize(instance.n_sections);
    evaluate(0, std::numeric_limits<std::int64_t>::max(), true);
  }

  // Places the buffers from position `from` on; false as soon as one ends above `limit`. With `keep` the skylines on the way are
  // kept, and later evaluations start from the last one before what has changed.
  bool evaluate(std::int32_t from, std::int64_t limit, bool keep) {
    const std::int32_t start = from / kStride;
    load(start);
    for (std::int32_t i = start * kStride; i < instance_.n(); ++i) {
      if (keep && i % kStride == 0) save(i / kStride);
      const std::int32_t b = order[i];
      std::int64_t floor = 0;
      std::int32_t support = -1;
      for (const Piece piece : instance_.pieces[b]) {
        for (std::int32_t s = piece.lo; s < piece.hi; ++s) {
          if (top_[s] > floor) {
            floor = top_[s];
            support = last_[s];
          }
        }
      }
      floor = instance_.align(floor, b);
      const std::int64_t end = floor + instance_.size[b];
      if (end > limit) return false;
      if (end > height) {
        height = end;
        highest = b;
      }
      offset[b] = floor;
      below[b] = support;
      for (const Piece piece : instance_.pieces[b]) {
        std::fill(top_.begin() + piece.lo, top_.begin() + piece.hi, end);
        std::fill(last_.begin() + piece.lo, last_.begin() + piece.hi, b);
      }
    }
    return true;
  }

  std::vector<std::int32_t> order;
  std::vector<std::int64_t> offset;
  std::vector<std::int32_t> below;  // what each one rests on, -1 the bottom
  std::int64_t height = 0;
  std::int32_t highest = -1;

 private:
  struct Kept {
    std::vector<std::int64_t> top;
    std::vector<std::int32_t> last;
    std::int64_t height = 0;
    std::int32_t highest = -1;
  };

  void load(std::int32_t k) {
    if (k < static_cast<std::int32_t>(kept_.size())) {
      top_ = kept_[k].top;
      last_ = kept_[k].last;
      height = kept_[k].height;
      highest = kept_[k].highest;
    } else {
      std::fill(top_.begin(), top_.end(), 0);
      height = 0;
    }
  }

  void save(std::int32_t k) {
    if (k >= static_cast<std::int32_t>(kept_.size())) kept_.resize(k + 1);
    kept_[k] = {top_, last_, height, highest};
  }

  const Instance& instance_;
  std::vector<std::int64_t> top_;
  std::vector<std::int32_t> last_;
  std::vector<Kept> kept_;
};

std::vector<std::int32_t> bottom_up(const Layout& layout) {
  std::vector<std::int32_t> order(layout.offset.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return layout.offset[a] < layout.offset[b]; });
  return order;
}

bool worth_it(const Instance& instance) {
  std::int64_t cells = 0;
  for (const auto& pieces : instance.pieces) {
    for (const Piece piece : pieces) cells += piece.hi - piece.lo;
  }
  return cells + instance.n() / kStride * instance.n_sections <= kMostCells;
}

void move(std::vector<std::int32_t>& order, std::int32_t from, std::int32_t to) {
  const auto at = order.begin();
  if (from > to) {
    std::rotate(at + to, at + from, at + from + 1);
  } else {
    std::rotate(at + from, at + from + 1, at + to + 1);
  }
}

}  // namespace

Layout local_search(const Instance& instance, Layout best, std::int64_t goal, std::uint64_t seed, const Clock& clock) {
  if (instance.n() < 2 || !worth_it(instance)) return best;
  std::mt19937_64 random(seed);
  const auto below = [&random](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  Skyline now(instance, bottom_up(best));
  std::int64_t height = now.height;
  std::vector<std::int32_t> position(instance.n()), chain;
  double heat = kWarm;
  for (std::int64_t step = 0; best.height > goal; ++step) {
    if (step % 64 == 0) {
      if (clock.over()) break;
      heat = kCold + (kWarm - kCold) * std::max(0.0, clock.left_s() / (clock.spent_s() + clock.left_s()));
    }
    chain.clear();
    for (std::int32_t b = now.highest; b >= 0; b = now.below[b]) chain.push_back(b);
    for (std::int32_t i = 0; i < instance.n(); ++i) position[now.order[i]] = i;
    const std::size_t pick = below(chain.size());
    const std::int32_t from = position[chain[pick]];
    std::int32_t to = static_cast<std::int32_t>(below(instance.n()));
    if (pick + 1 < chain.size() && random() % 2 == 0) to = position[chain[pick + 1 + below(chain.size() - pick - 1)]];
    if (from == to) continue;
    const double noise = -std::log(1e-12 + static_cast<double>(random() >> 11) / 9007199254740992.0);
    const auto limit = height + static_cast<std::int64_t>(heat * static_cast<double>(height) * noise * 0.3);
    move(now.order, from, to);
    const std::int32_t changed = std::min(from, to);
    if (now.evaluate(changed, limit, true)) {
      height = now.height;
      if (height < best.height) best = {now.offset, height};
    } else {
      move(now.order, to, from);
      now.evaluate(changed, std::numeric_limits<std::int64_t>::max(), true);
    }
  }
  return best;
}

}  // namespace memtune::layout
