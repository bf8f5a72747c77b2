#include "vmm/planned.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "layout/heuristic.h"

namespace memtune::vmm {

Planned::~Planned() {
  if (base_ == 0) return;
  resize(0);
  memory_.give_back(base_, options_.range_bytes);
}

Address Planned::allocate(std::int64_t bytes, std::int32_t stream) {
  if (plans_ == 0) return 0;
  bytes = in_blocks(bytes);
  const std::int64_t row = steps_.recognise(bytes, stream);
  const std::int64_t offset = row < 0 ? -1 : offset_[static_cast<std::size_t>(row)];
  if (row < 0 || (offset >= 0 && !is_free(offset, bytes))) steps_.deviated(bytes, stream);
  if (offset < 0 || !is_free(offset, bytes)) return 0;
  ++served_;
  live_.emplace(offset, offset + bytes);
  return base_ + static_cast<Address>(offset);
}

bool Planned::free(Address address) {
  if (base_ == 0 || address < base_) return false;
  return live_.erase(static_cast<std::int64_t>(address - base_)) > 0;
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
  if (!resize(std::max(height, used))) {
    offset_.assign(watched.size(), -1);  // nothing has a place
    return false;
  }
  offset_ = std::move(offset);
  height_ = height;
  bound_ = bound;
  ++plans_;
  return true;
}

std::int64_t Planned::planned_requests() const {
  return std::count_if(offset_.begin(), offset_.end(), [](std::int64_t offset) { return offset >= 0; });
}

void Planned::add_regions(std::vector<Region>& regions) const {
  if (chunks_.empty()) return;
  Region region{base_, static_cast<std::int64_t>(chunks_.size()) * kChunkBytes, -1, "planned", {}};
  std::int64_t at = 0;
  const auto add = [&](std::int64_t end, bool in_use) {
    if (end > at) region.parts.push_back({base_ + static_cast<Address>(at), end - at, in_use});
    at = std::max(at, end);
  };
  for (const auto& [offset, end] : live_) {
    add(offset, false);
    add(end, true);
  }
  add(region.bytes, false);
  regions.push_back(std::move(region));
}

// Memory under the first `height` bytes and no more; false and nothing changed where it cannot be had.
bool Planned::resize(std::int64_t height) {
  if (base_ == 0 && height > 0) base_ = memory_.reserve(options_.range_bytes);
  if (height > options_.range_bytes || (base_ == 0 && height > 0)) return false;
  const auto wanted = static_cast<std::size_t>(in_chunks(height) / kChunkBytes);
  if (wanted > chunks_.size()) {
    const std::vector<Chunk> more = memory_.create(static_cast<std::int64_t>(wanted - chunks_.size()));
    if (more.empty()) return false;
    if (!memory_.map(base_ + chunks_.size() * kChunkBytes, more)) {
      memory_.release(more);
      return false;
    }
    chunks_.insert(chunks_.end(), more.begin(), more.end());
  } else if (wanted < chunks_.size()) {
    const std::vector<Chunk> less(chunks_.begin() + static_cast<std::ptrdiff_t>(wanted), chunks_.end());
    memory_.synchronize();
    memory_.unmap(base_ + wanted * kChunkBytes, static_cast<std::int64_t>(less.size()) * kChunkBytes);
    memory_.release(less);
    chunks_.resize(wanted);
  }
  return true;
}

}  // namespace memtune::vmm
