#include "vmm/steps.h"

#include <algorithm>
#include <utility>

namespace memtune::vmm {

std::int64_t Steps::recognise(std::int64_t bytes, std::int32_t stream) {
  Slot* const slot = find(sequences_[stream], in_blocks(bytes));
  if (slot == nullptr) return -1;
  slot->used = true;
  return slot->row;
}

// The next unused slot of this size, ahead of the cursor or else behind it, within the window.
Steps::Slot* Steps::find(Sequence& sequence, std::int64_t bytes) {
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
  if (!options_.any_size) return nullptr;
  while (sequence.cursor < slots.size() && slots[sequence.cursor].used) ++sequence.cursor;
  return sequence.cursor < slots.size() ? &slots[sequence.cursor++] : nullptr;
}

void Steps::deviated(std::int64_t bytes, std::int32_t stream) {
  if (deviations_++ == 0) {
    const Sequence& sequence = sequences_[stream];
    const auto& slots = sequence.slots;
    first_deviation_ = "request " + std::to_string(sequence.cursor) + " of step " + std::to_string(steps_) + " asks for " +
                       std::to_string(in_blocks(bytes)) + " bytes; the plan has " +
                       (sequence.cursor < slots.size() ? std::to_string(slots[sequence.cursor].bytes) + " bytes there" : "no more requests");
  }
  ++since_learned_;
}

void Steps::saw_allocation(std::uint64_t address, std::int64_t bytes, std::int32_t stream) {
  const std::int64_t now = clock_++;
  if (watching_ != Watching::kSteps || steps_ < options_.skip_steps) return;
  open_[address] = rows_.size();
  rows_.push_back({in_blocks(bytes), now, -1, stream});
}

void Steps::saw_free(std::uint64_t address) {
  const std::int64_t now = clock_++;
  const auto found = open_.find(address);
  if (found == open_.end()) return;
  rows_[found->second].end = now;
  open_.erase(found);
}

bool Steps::end_step() {
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
  } else if (watching_ == Watching::kNothing && since_learned_ > options_.replan_after) {
    options_.replan_after *= 2;
    watching_ = Watching::kSteps;
  }
  if (watching_ == Watching::kSteps) clock_ = 0;
  return complete;
}

std::vector<Steps::Row> Steps::learn() {
  since_learned_ = 0;
  open_.clear();
  sequences_.clear();
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    Row& each = rows_[row];
    if (each.end > each.start + period_) each.end = -1;
    sequences_[each.stream].slots.push_back({each.bytes, static_cast<std::int64_t>(row)});
  }
  ++learned_;
  return std::exchange(rows_, {});
}

}  // namespace memtune::vmm
