#include "vmm/planned.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "layout/heuristic.h"

namespace memtune::vmm {

namespace {
constexpr std::int64_t kFewDeviations = 16;  // of a step, in addition to an eighth of the planned requests: varying workspace
}

Planned::~Planned() {
  if (base_ == 0) return;
  live_.clear();
  unmap_unused(0);
  memory_.give_back(base_, options_.range_bytes);
}

Address Planned::allocate(std::int64_t bytes, std::int32_t stream) {
  if (plans_ == 0) return 0;
  bytes = in_blocks(bytes);
  const std::int64_t row = steps_.recognise(bytes, stream);
  const std::int64_t offset = row < 0 ? -1 : offset_[static_cast<std::size_t>(row)];
  ++requests_;
  const bool taken = active_ && offset >= 0 && !is_free(offset, bytes);
  if (row < 0 || taken) {
    steps_.deviated(bytes, stream);
    if (++deviations_ > kFewDeviations + planned_ / 8 && active_) suspend();
  }
  if (!active_ || offset < 0 || taken) return 0;
  ++served_;
  live_.emplace(offset, offset + bytes);
  return base_ + static_cast<Address>(offset);
}

bool Planned::free(Address address) {
  if (base_ == 0 || address < base_) return false;
  return live_.erase(static_cast<std::int64_t>(address - base_)) > 0;
}

bool Planned::end_step() {
  followed_ = deviations_ <= kFewDeviations && requests_ > 0 ? followed_ + 1 : 0;
  requests_ = deviations_ = 0;
  if (!active_) unmap_unused(0);
  return steps_.end_step();
}

void Planned::suspend() {
  if (!active_) return;
  active_ = false;
  followed_ = 0;
  unmap_unused(0);
}

bool Planned::resume() {
  resume_after_ *= 2;
  followed_ = 0;
  active_ = resize(std::max(height_, live_.empty() ? 0 : live_.rbegin()->second));
  return active_;
}

bool Planned::is_free(std::int64_t offset, std::int64_t bytes) const {
  const auto next = live_.upper_bound(offset);
  if (next != live_.end() && next->first < offset + bytes) return false;
  return next == live_.begin() || std::prev(next)->second <= offset;
}

bool Planned::adopt() {
  const std::vector<Steps::Row> watched = steps_.learn();
  std::map<std::int32_t, std::vector<std::size_t>> rows_of;
  for (std::size_t row = 0; row < watched.size(); ++row) {
    if (watched[row].end >= 0) rows_of[watched[row].stream].push_back(row);  // Rule 4
  }
  std::int64_t height = 0, bound = 0;
  std::vector<std::int64_t> offset(watched.size(), -1);
  const layout::Clock clock(options_.layout_s);
  for (const auto& [stream, rows] : rows_of) {  // Rule 2
    std::vector<std::int64_t> start, end, size, alignment(rows.size(), kBlockBytes);
    for (const std::size_t row : rows) {
      start.push_back(watched[row].start);
      end.push_back(watched[row].end);
      size.push_back(watched[row].bytes);
    }
    const layout::Instance instance = layout::compile({start, end, size, alignment, steps_.period()});
    const std::vector<std::int64_t> totals = layout::section_totals(instance);
    const std::int64_t most = *std::max_element(totals.begin(), totals.end());
    const layout::Layout found = layout::pack(instance, most, 0, clock);
    for (std::size_t i = 0; i < rows.size(); ++i) offset[rows[i]] = height + found.offset[i] * instance.unit;
    height += found.height * instance.unit;
    bound += most * instance.unit;
  }
  const std::int64_t used = live_.empty() ? 0 : live_.rbegin()->second;
  followed_ = 0;
  active_ = resize(std::max(height, used));
  if (!active_) {
    offset_.assign(watched.size(), -1);  // nothing has a place
    planned_ = 0;
    return false;
  }
  offset_ = std::move(offset);
  planned_ = std::count_if(offset_.begin(), offset_.end(), [](std::int64_t each) { return each >= 0; });
  height_ = height;
  bound_ = bound;
  ++plans_;
  return true;
}

// A region for each run of pages.
void Planned::add_regions(std::vector<Region>& regions) const {
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (!pages_[page]) continue;
    const auto from = static_cast<std::int64_t>(page) * kChunkBytes;
    while (page < pages_.size() && pages_[page]) ++page;
    const auto to = static_cast<std::int64_t>(page) * kChunkBytes;
    Region region{base_ + static_cast<Address>(from), to - from, -1, "planned", {}};
    std::int64_t at = from;
    const auto add = [&](std::int64_t end, bool in_use) {
      if (end > at) region.parts.push_back({base_ + static_cast<Address>(at), end - at, in_use});
      at = std::max(at, end);
    };
    for (const auto& [offset, end] : live_) {
      if (end <= from || offset >= to) continue;
      add(offset, false);
      add(end, true);
    }
    add(to, false);
    regions.push_back(std::move(region));
  }
}

// Memory under the first `height` bytes and no more; false where it cannot be had, and nothing is new then.
bool Planned::resize(std::int64_t height) {
  if (base_ == 0 && height > 0) base_ = memory_.reserve(options_.range_bytes);
  if (height > options_.range_bytes || (base_ == 0 && height > 0)) return false;
  const auto wanted = static_cast<std::size_t>(in_chunks(height) / kChunkBytes);
  if (wanted < pages_.size()) unmap_unused(static_cast<std::int64_t>(wanted) * kChunkBytes);
  pages_.resize(wanted);
  const std::vector<Chunk> more = memory_.create(std::count(pages_.begin(), pages_.end(), std::nullopt));
  if (more.empty()) return std::find(pages_.begin(), pages_.end(), std::nullopt) == pages_.end();
  std::span<const Chunk> left = more;
  for (std::size_t page = 0; page < wanted; ++page) {
    if (pages_[page]) continue;
    std::size_t end = page;
    while (end < wanted && !pages_[end]) ++end;
    const std::span<const Chunk> run = left.first(end - page);
    if (!memory_.map(base_ + page * kChunkBytes, run)) {
      memory_.release(left);
      return false;
    }
    std::copy(run.begin(), run.end(), pages_.begin() + static_cast<std::ptrdiff_t>(page));
    left = left.subspan(run.size());
    page = end;
  }
  return true;
}

// Gives memory back, from this offset on, that nothing in use touches.
void Planned::unmap_unused(std::int64_t from) {
  bool waited = false;
  for (auto page = static_cast<std::size_t>(from / kChunkBytes); page < pages_.size(); ++page) {
    if (!pages_[page] || !is_free(static_cast<std::int64_t>(page) * kChunkBytes, kChunkBytes)) continue;
    if (!waited) memory_.synchronize();
    waited = true;
    memory_.unmap(base_ + page * kChunkBytes, kChunkBytes);
    memory_.release({&*pages_[page], 1});
    pages_[page].reset();
  }
}

}  // namespace memtune::vmm
