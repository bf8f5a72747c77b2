#include "vmm/planned.h"

#include <algorithm>
#include <iterator>

#include "layout/heuristic.h"
#include "vmm/arena.h"

namespace memtune::vmm {

namespace {

std::int64_t in_blocks(std::int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; }

}  // namespace

Planned::~Planned() {
  if (base_ == 0) return;
  resize(0);
  memory_.give_back(base_, options_.range_bytes);
}

Address Planned::allocate(std::int64_t bytes, std::int32_t stream) {
  if (plans_ == 0) return 0;
  bytes = in_blocks(bytes);
  Slot* const slot = find(sequences_[stream], bytes);
  if (slot == nullptr || (slot->offset >= 0 && !is_free(slot->offset, bytes))) {
    deviated(bytes, stream);
    return 0;
  }
  slot->used = true;
  if (slot->offset < 0) return 0;
  ++served_;
  live_.emplace(slot->offset, slot->offset + bytes);
  return base_ + static_cast<Address>(slot->offset);
}

bool Planned::free(Address address) {
  if (base_ == 0 || address < base_) return false;
  return live_.erase(static_cast<std::int64_t>(address - base_)) > 0;
}

// The next unused slot of this size, ahead of the cursor or else behind it, within the window.
Planned::Slot* Planned::find(Sequence& sequence, std::int64_t bytes) {
  auto& slots = sequence.slots;
  const auto window = static_cast<std::size_t>(options_.window);
  const std::size_t last = std::min(slots.size(), sequence.cursor + window);
  for (std::size_t i = sequence.cursor; i < last; ++i) {
    if (slots[i].used || slots[i].bytes != bytes) continue;
    sequence.cursor = i + 1;
    return &slots[i];
  }
  for (std::size_t i = sequence.cursor - std::min(sequence.cursor, window); i < sequence.cursor; ++i) {
    if (!slots[i].used && slots[i].bytes == bytes) return &slots[i];
  }
  return nullptr;
}

bool Planned::is_free(std::int64_t offset, std::int64_t bytes) const {
  const auto next = live_.upper_bound(offset);
  if (next != live_.end() && next->first < offset + bytes) return false;
  return next == live_.begin() || std::prev(next)->second <= offset;
}

void Planned::deviated(std::int64_t bytes, std::int32_t stream) {
  if (deviations_++ == 0) {
    const Sequence& sequence = sequences_[stream];
    const auto& slots = sequence.slots;
    first_deviation_ = "request " + std::to_string(sequence.cursor) + " of step " + std::to_string(steps_) + " asks for " +
                       std::to_string(bytes) + " bytes; the plan has " +
                       (sequence.cursor < slots.size() ? std::to_string(slots[sequence.cursor].bytes) + " bytes there" : "no more requests");
  }
  ++since_plan_;
}

void Planned::saw_allocation(Address address, std::int64_t bytes, std::int32_t stream) {
  const std::int64_t now = clock_++;
  if (watching_ != Watching::kSteps || steps_ < options_.skip_steps) return;
  open_[address] = rows_.size();
  rows_.push_back({in_blocks(bytes), now, -1, stream});
}

void Planned::saw_free(Address address) {
  const std::int64_t now = clock_++;
  const auto found = open_.find(address);
  if (found == open_.end()) return;
  rows_[found->second].end = now;
  open_.erase(found);
}

bool Planned::end_step() {
  for (auto& [stream, sequence] : sequences_) {
    sequence.cursor = 0;
    for (Slot& slot : sequence.slots) slot.used = false;
  }
  const bool watched = steps_++ >= options_.skip_steps;
  bool complete = false;
  if (watching_ == Watching::kSteps && watched) {
    period_ = clock_;
    watching_ = Watching::kFrees;
  } else if (watching_ == Watching::kFrees) {
    watching_ = Watching::kNothing;
    complete = true;
  } else if (watching_ == Watching::kNothing && since_plan_ > options_.replan_after) {
    options_.replan_after *= 2;
    watching_ = Watching::kSteps;
  }
  if (watching_ == Watching::kSteps) clock_ = 0;
  return complete;
}

bool Planned::adopt() {
  since_plan_ = 0;
  open_.clear();
  std::map<std::int32_t, Sequence> made;
  std::map<std::int32_t, std::vector<std::size_t>> rows_of;
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    Row& each = rows_[row];
    if (each.end > each.start + period_) each.end = -1;  // Rule 4
    made[each.stream].slots.push_back({each.bytes, -1});
    if (each.end >= 0) rows_of[each.stream].push_back(row);
  }
  std::int64_t height = 0, bound = 0;
  std::vector<std::int64_t> offset(rows_.size(), -1);
  const layout::Clock clock(options_.layout_s);
  for (const auto& [stream, rows] : rows_of) {  // Rule 2
    std::vector<std::int64_t> start, end, size, alignment(rows.size(), kBlockBytes);
    for (const std::size_t row : rows) {
      start.push_back(rows_[row].start);
      end.push_back(rows_[row].end);
      size.push_back(rows_[row].bytes);
    }
    const layout::Instance instance = layout::compile({start, end, size, alignment, period_});
    const std::vector<std::int64_t> totals = layout::section_totals(instance);
    const std::int64_t most = *std::max_element(totals.begin(), totals.end());
    const layout::Layout found = layout::pack(instance, most, 0, clock);
    for (std::size_t i = 0; i < rows.size(); ++i) offset[rows[i]] = height + found.offset[i] * instance.unit;
    height += found.height * instance.unit;
    bound += most * instance.unit;
  }
  std::map<std::int32_t, std::size_t> next;
  for (std::size_t row = 0; row < rows_.size(); ++row) made[rows_[row].stream].slots[next[rows_[row].stream]++].offset = offset[row];
  rows_.clear();
  const std::int64_t used = live_.empty() ? 0 : live_.rbegin()->second;
  if (!resize(std::max(height, used))) return false;
  sequences_ = std::move(made);
  height_ = height;
  bound_ = bound;
  ++plans_;
  return true;
}

std::int64_t Planned::planned_requests() const {
  std::int64_t count = 0;
  for (const auto& [stream, sequence] : sequences_) {
    count += std::count_if(sequence.slots.begin(), sequence.slots.end(), [](const Slot& slot) { return slot.offset >= 0; });
  }
  return count;
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
