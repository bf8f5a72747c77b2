#include "layout/validate.h"

#include <algorithm>
#include <map>
#include <vector>

namespace memtune::layout {

namespace {

struct Moment {
  std::int64_t at;
  bool begins;  // ends come first: a place may be taken at the moment it is left
  std::size_t buffer;
  bool operator<(const Moment& other) const { return at != other.at ? at < other.at : begins < other.begins; }
};

}  // namespace

std::string fault(std::span<const std::int64_t> start, std::span<const std::int64_t> end, std::span<const std::int64_t> size,
                  std::span<const std::int64_t> alignment, std::int64_t period, std::span<const std::int64_t> offset, std::int64_t height) {
  const auto name = [](std::size_t i) { return "buffer " + std::to_string(i); };
  std::vector<Moment> moments;
  std::int64_t reached = 0;
  for (std::size_t i = 0; i < start.size(); ++i) {
    if (offset[i] < 0) return name(i) + " has no offset";
    if (offset[i] % alignment[i] != 0) return name(i) + " is off its alignment";
    reached = std::max(reached, offset[i] + size[i]);
    // On a circle every lifetime is looked at in this period and in the one before.
    for (const std::int64_t shift : {std::int64_t{0}, -period}) {
      if (shift < 0 && end[i] <= period) continue;
      moments.push_back({start[i] + shift, true, i});
      moments.push_back({end[i] + shift, false, i});
      if (period == 0) break;
    }
  }
  if (reached > height) return "a buffer ends at " + std::to_string(reached) + ", above the height " + std::to_string(height);
  std::sort(moments.begin(), moments.end());
  std::map<std::int64_t, std::size_t> alive;
  for (const Moment& moment : moments) {
    const std::size_t i = moment.buffer;
    if (!moment.begins) {
      alive.erase(offset[i]);
      continue;
    }
    const auto [here, added] = alive.insert({offset[i], i});
    const auto clash = [&](std::size_t other) { return name(i) + " and " + name(other) + " are in one place at " + std::to_string(moment.at); };
    if (!added) return clash(here->second);
    const auto above = std::next(here);
    if (above != alive.end() && offset[i] + size[i] > above->first) return clash(above->second);
    if (here != alive.begin() && std::prev(here)->first + size[std::prev(here)->second] > offset[i]) return clash(std::prev(here)->second);
  }
  return "";
}

}  // namespace memtune::layout
