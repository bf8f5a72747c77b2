// Free blocks in order of size, then address: what a best-fit search walks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memtune {

// A sorted list in chunks of at most kChunk rows. Allocators keep tens of free blocks, for which one chunk and a short move
// beat any tree; a hundred thousand of them still cost only a search over the chunks.
class FreeList {
 public:
  struct Entry {
    std::int64_t bytes, address;
    std::int32_t block;

    auto key() const { return std::pair(bytes, address); }
  };

  // Where an entry stands; any change of the list makes it stale.
  struct Place {
    std::size_t chunk, row;
  };

  bool empty() const { return chunks_.empty(); }
  const Entry& largest() const { return chunks_.back().back(); }
  bool holds(Place place) const { return place.chunk < chunks_.size(); }
  const Entry& at(Place place) const { return chunks_[place.chunk][place.row]; }

  // The first entry of at least `bytes` and, among those of that size, at `address` or above.
  Place lower_bound(std::int64_t bytes, std::int64_t address) const {
    const auto key = std::pair(bytes, address);
    const auto chunk = std::lower_bound(chunks_.begin(), chunks_.end(), key,
                                        [](const auto& rows, const auto& wanted) { return rows.back().key() < wanted; });
    if (chunk == chunks_.end()) return {chunks_.size(), 0};
    const auto row = std::lower_bound(chunk->begin(), chunk->end(), key,
                                      [](const Entry& entry, const auto& wanted) { return entry.key() < wanted; });
    return {static_cast<std::size_t>(chunk - chunks_.begin()), static_cast<std::size_t>(row - chunk->begin())};
  }

  Place after(Place place) const {
    return place.row + 1 < chunks_[place.chunk].size() ? Place{place.chunk, place.row + 1} : Place{place.chunk + 1, 0};
  }

  // Moves `place` to the entry before it; false if there is none.
  bool step_back(Place& place) const {
    if (place.row > 0) return --place.row, true;
    if (place.chunk == 0) return false;
    place = {place.chunk - 1, chunks_[place.chunk - 1].size() - 1};
    return true;
  }

  void insert(Entry entry) {
    if (chunks_.empty()) {
      chunks_.emplace_back().reserve(kChunk);
      chunks_.back().push_back(entry);
      return;
    }
    Place place = lower_bound(entry.bytes, entry.address);
    if (!holds(place)) place = {chunks_.size() - 1, chunks_.back().size()};
    auto& rows = chunks_[place.chunk];
    rows.insert(rows.begin() + static_cast<std::ptrdiff_t>(place.row), entry);
    if (rows.size() == kChunk) halve(place.chunk);
  }

  void erase(Place place) {
    auto& rows = chunks_[place.chunk];
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(place.row));
    if (rows.empty()) chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(place.chunk));
  }

  void erase(std::int64_t bytes, std::int64_t address) { erase(lower_bound(bytes, address)); }

  template <typename Visit>
  void for_each(Visit visit) const {
    for (const auto& rows : chunks_) {
      for (const Entry& entry : rows) visit(entry);
    }
  }

 private:
  static constexpr std::size_t kChunk = 64;

  void halve(std::size_t chunk) {
    std::vector<Entry> upper;
    upper.reserve(kChunk);
    auto& rows = chunks_[chunk];
    upper.assign(rows.begin() + kChunk / 2, rows.end());
    rows.resize(kChunk / 2);
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(chunk) + 1, std::move(upper));
  }

  std::vector<std::vector<Entry>> chunks_;
};

}  // namespace memtune
