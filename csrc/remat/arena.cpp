#include "remat/arena.h"

#include <algorithm>

namespace memtune::remat {

Arena::Arena(const ArenaSettings& settings) : settings_(settings) {
  if (!settings_.addressed) settings_.small_bytes = settings_.small_capacity = 0;
  settings_.small_capacity = std::min(settings_.small_capacity, settings_.capacity);
  if (settings_.addressed) pieces_[0] = {0, settings_.capacity - settings_.small_capacity, -1};
}

bool Arena::is_small(Bytes bytes) const {
  return bytes <= settings_.small_bytes && small_used_ + rounded(bytes) <= settings_.small_capacity;
}

Bytes Arena::largest_hole() const {
  Bytes largest = 0;
  for (const auto& [offset, piece] : pieces_)
    if (piece.storage < 0) largest = std::max(largest, piece.bytes);
  return largest;
}

bool Arena::fits(Bytes bytes) const {
  if (bytes == 0 || is_small(bytes)) return true;
  const Bytes wanted = rounded(bytes);
  if (!settings_.addressed) return used_ + wanted <= settings_.capacity;
  return std::any_of(pieces_.begin(), pieces_.end(), [&](const auto& at) { return at.second.storage < 0 && at.second.bytes >= wanted; });
}

void Arena::count(Bytes bytes) {
  used_ += bytes;
  peak_ = std::max(peak_, used_);
}

bool Arena::place(Id storage, Bytes bytes, bool right) {
  const Bytes wanted = rounded(bytes);
  const bool small = bytes > 0 && is_small(bytes);
  if (bytes == 0 || small || !settings_.addressed) {
    if (bytes > 0 && !small && used_ + wanted > settings_.capacity) return false;
    if (small) small_used_ += wanted;
    unaddressed_[storage] = {wanted, small};
    count(wanted);
    return true;
  }
  auto found = pieces_.end();
  for (auto at = pieces_.begin(); at != pieces_.end(); ++at) {
    if (at->second.storage >= 0 || at->second.bytes < wanted) continue;
    if (found != pieces_.end() && settings_.best_fit && at->second.bytes >= found->second.bytes) continue;
    found = at;
    if (!settings_.best_fit && !right) break;
  }
  if (found == pieces_.end()) return false;
  const Piece hole = found->second;
  const Bytes rest = hole.bytes - wanted;
  pieces_.erase(found);
  const Bytes offset = right ? hole.offset + rest : hole.offset;
  pieces_[offset] = {offset, wanted, storage};
  if (rest > 0) {
    const Bytes at = right ? hole.offset : hole.offset + wanted;
    pieces_[at] = {at, rest, -1};
  }
  offset_[storage] = offset;
  count(wanted);
  return true;
}

void Arena::remove(Id storage) {
  if (const auto there = unaddressed_.find(storage); there != unaddressed_.end()) {
    used_ -= there->second.bytes;
    if (there->second.small) small_used_ -= there->second.bytes;
    unaddressed_.erase(there);
    return;
  }
  auto at = pieces_.find(offset_.at(storage));
  offset_.erase(storage);
  used_ -= at->second.bytes;
  at->second.storage = -1;
  if (const auto next = std::next(at); next != pieces_.end() && next->second.storage < 0) {
    at->second.bytes += next->second.bytes;
    pieces_.erase(next);
  }
  if (at == pieces_.begin()) return;
  if (const auto before = std::prev(at); before->second.storage < 0) {
    before->second.bytes += at->second.bytes;
    pieces_.erase(at);
  }
}

void Arena::take_over(Id from, Id to) {
  if (const auto there = unaddressed_.find(from); there != unaddressed_.end()) {
    const Unaddressed held = there->second;
    unaddressed_.erase(there);
    unaddressed_[to] = held;
    return;
  }
  const Bytes offset = offset_.at(from);
  offset_.erase(from);
  offset_[to] = offset;
  pieces_[offset].storage = to;
}

Bytes Arena::compact(bool whole) {
  if (whole) settings_.small_capacity = small_used_;
  std::map<Bytes, Piece> packed;
  Bytes at = 0, moved = 0;
  for (const auto& [offset, piece] : pieces_) {
    if (piece.storage < 0) continue;
    if (offset != at) moved += piece.bytes;
    packed[at] = {at, piece.bytes, piece.storage};
    offset_[piece.storage] = at;
    at += piece.bytes;
  }
  const Bytes end = settings_.capacity - settings_.small_capacity;
  if (at < end) packed[at] = {at, end - at, -1};
  pieces_ = std::move(packed);
  return moved;
}

Bytes Arena::free_around(Id storage) const {
  const auto place = offset_.find(storage);
  if (place == offset_.end()) return 0;
  const auto at = pieces_.find(place->second);
  Bytes sum = 0;
  if (const auto next = std::next(at); next != pieces_.end() && next->second.storage < 0) sum += next->second.bytes;
  if (at != pieces_.begin())
    if (const auto before = std::prev(at); before->second.storage < 0) sum += before->second.bytes;
  return sum;
}

}  // namespace memtune::remat
