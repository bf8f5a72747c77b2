#include "layout/problem.h"

#include <algorithm>
#include <ctime>
#include <numeric>
#include <stdexcept>
#include <string>

namespace memtune::layout {

namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 61;

void check(const Problem& p) {
  const std::size_t n = p.start.size();
  if (p.end.size() != n || p.size.size() != n || p.alignment.size() != n) throw std::invalid_argument("columns must have the same length");
  if (p.period < 0) throw std::invalid_argument("period must be 0 (a line) or positive");
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto bad = [i](const char* why) { return std::invalid_argument("buffer " + std::to_string(i) + ": " + why); };
    if (p.start[i] >= p.end[i]) throw bad("start must be before end");
    if (p.period > 0 && (p.start[i] < 0 || p.start[i] >= p.period)) throw bad("start must be within the period");
    if (p.period > 0 && p.end[i] - p.period > p.start[i]) throw bad("must not live longer than the period");
    if (p.size[i] < 1 || p.size[i] > kMost) throw bad("size must be positive and below 2^61");
    if (p.alignment[i] < 1 || p.alignment[i] > (1 << 30)) throw bad("alignment must be from 1 to 2^30");
    sum += p.size[i] + p.alignment[i];
    if (sum > kMost) throw std::invalid_argument("sizes sum up to more than 2^61 bytes");
  }
}

struct Range {
  std::int64_t from, to;
};

// The parts of a lifetime within [0, period), or the lifetime itself on a line.
std::array<Range, 2> parts(const Problem& p, std::size_t i) {
  if (p.period > 0 && p.end[i] > p.period) return {Range{p.start[i], p.period}, Range{0, p.end[i] - p.period}};
  return {Range{p.start[i], p.end[i]}, Range{0, 0}};
}

// A section is a run of moments between a start and the next end that follows it: before the next start, buffers only go.
struct Sections {
  std::vector<std::int64_t> at;  // first moment of each

  Piece of(Range range) const {
    const auto lo = std::lower_bound(at.begin(), at.end(), range.from), hi = std::lower_bound(at.begin(), at.end(), range.to);
    return {static_cast<std::int32_t>(lo - at.begin()), static_cast<std::int32_t>(hi - at.begin())};
  }
};

Sections find_sections(const Problem& p) {
  std::vector<std::int64_t> starts, ends;
  for (std::size_t i = 0; i < p.start.size(); ++i) {
    for (const Range range : parts(p, i)) {
      if (range.from == range.to) continue;
      starts.push_back(range.from);
      ends.push_back(range.to);
    }
  }
  std::sort(starts.begin(), starts.end());
  std::sort(ends.begin(), ends.end());
  Sections sections;
  std::size_t end = 0;
  for (std::size_t i = 0; i < starts.size(); ++i) {
    while (end < ends.size() && ends[end] <= starts[i]) ++end;
    // The last start before an end: from here to that end most buffers are alive.
    if (i + 1 == starts.size() || starts[i + 1] >= ends[end]) sections.at.push_back(starts[i]);
  }
  return sections;
}

double now_s() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

Clock::Clock(double limit_s) : began_s_(now_s()), limit_s_(limit_s) {}

double Clock::spent_s() const { return now_s() - began_s_; }

Instance compile(const Problem& p) {
  check(p);
  const std::size_t n = p.start.size();
  Instance instance;
  instance.plain = std::all_of(p.alignment.begin(), p.alignment.end(), [&](std::int64_t a) { return a == p.alignment[0]; });
  const Sections sections = find_sections(p);
  instance.n_sections = static_cast<std::int32_t>(sections.at.size());
  std::int64_t unit = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t a = p.alignment[i], rounded = (p.size[i] + a - 1) / a * a;
    instance.size.push_back(rounded);
    instance.alignment.push_back(instance.plain ? 1 : a);
    instance.duration.push_back(p.end[i] - p.start[i]);
    unit = std::gcd(unit, rounded);
    const auto [first, second] = parts(p, i);
    instance.pieces.push_back({sections.of(first), second.to > 0 ? sections.of(second) : Piece{}});
  }
  // Every height is a multiple of the unit, so a search need not try what is in between.
  if (instance.plain && unit > 1) {
    instance.unit = unit;
    for (std::int64_t& size : instance.size) size /= unit;
  }
  return instance;
}

std::vector<std::int64_t> section_totals(const Instance& instance) {
  std::vector<std::int64_t> change(instance.n_sections + 1, 0);
  for (std::int32_t b = 0; b < instance.n(); ++b) {
    for (const Piece piece : instance.pieces[b]) {
      change[piece.lo] += instance.size[b];
      change[piece.hi] -= instance.size[b];
    }
  }
  for (std::int32_t s = 1; s <= instance.n_sections; ++s) change[s] += change[s - 1];
  change.resize(instance.n_sections);
  return change;
}

}  // namespace memtune::layout
