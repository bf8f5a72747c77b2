// The caching allocator itself: blocks, pools and segments; allocator.h says whose rules these are.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "rows.h"
#include "simulator/allocator.h"
#include "simulator/free_list.h"

namespace memtune {

inline constexpr std::int64_t kMinBlockBytes = 512;        // all sizes are multiples of this
inline constexpr std::int64_t kSmallBytes = 1 << 20;       // the largest request that the small pool serves
inline constexpr std::int64_t kSmallSegmentBytes = 2 << 20;
inline constexpr std::int64_t kMinLargeBytes = 10 << 20;   // requests from here on get a segment of their own …
inline constexpr std::int64_t kRoundLargeBytes = 2 << 20;  // … of a multiple of this

// Frees that wait for other streams: blocks by the op at which those have finished.
class PendingFrees {
 public:
  // Calls `make_free` for the block at once, or later on if other streams still use it at `op`.
  template <typename MakeFree>
  void free(std::int32_t block, std::int64_t op, std::int64_t ready_op, MakeFree make_free) {
    if (ready_op > op) {
      heap_.emplace(ready_op, block);
    } else {
      make_free(block);
    }
  }

  // Calls `make_free` for every block that is ready at `op`, and forgets it.
  template <typename MakeFree>
  void finish_until(std::int64_t op, MakeFree make_free) {
    while (!heap_.empty() && heap_.top().first <= op) {
      make_free(heap_.top().second);
      heap_.pop();
    }
  }

 private:
  using Wait = std::pair<std::int64_t, std::int32_t>;
  std::priority_queue<Wait, std::vector<Wait>, std::greater<>> heap_;
};

// Rules that the code below keeps:
//  1. Blocks of one segment are a doubly linked list in order of address, without gaps.
//  2. Two neighbours that are both free and both mapped (or both unmapped) are one block.
//  3. A mapped free block is in its pool's `free`, an unmapped one in `unmapped`, a block in use in neither.
class CachingAllocator {
 public:
  explicit CachingAllocator(const AllocatorConfig& config);

  // Takes in memory that was reserved before; returns the blocks in use, in order.
  std::vector<std::int32_t> adopt(const HeldMemory& held);

  struct Block {
    std::int64_t address, bytes;
    std::int64_t searched;  // searches of its pool when it became free: its age, where blocks are collected
    std::int32_t previous = -1, next = -1;
    std::int32_t stream = 0;
    std::int32_t range = -1;  // index of the expandable segment, -1: a plain one
    bool small = false, in_use = false, mapped = true;
  };

  // The block that now belongs to the caller, -1 when memory has run out.
  std::int32_t allocate(std::int64_t bytes, std::int32_t stream, std::int64_t op);
  // Gives a block back at once, or at the first allocation from `ready_op` on if other streams still use it at `op`.
  void free(std::int32_t block, std::int64_t op, std::int64_t ready_op) {
    pending_.free(block, op, ready_op, [&](std::int32_t ready) { make_free(ready); });
  }
  // Waits for all streams, then returns to the driver whatever is entirely unused.
  void release_cached();

  const Block& block(std::int32_t index) const { return blocks_[index]; }
  std::int64_t reserved_bytes() const { return reserved_; }
  std::int64_t device_allocs() const { return device_allocs_; }
  std::int64_t device_frees() const { return device_frees_; }
  std::int64_t retries() const { return retries_; }
  // The largest value of reserved_bytes, also within a call that gave some of it back again.
  std::int64_t peak_reserved_bytes() const { return peak_reserved_; }
  void restart_peak() { peak_reserved_ = reserved_; }
  // Changes the limit of the process; what is held already stays.
  void allow(std::int64_t bytes) { config_.allowed_bytes = bytes; }
  std::int64_t largest_free_bytes() const;

 private:
  // Free blocks of one size class and stream.
  struct Pool {
    FreeList free;
    std::set<std::pair<std::int64_t, std::int32_t>> unmapped;  // by address
  };

  // Addresses of an expandable segment; its pages are mapped as they are needed.
  struct Range {
    std::int64_t base, bytes, page_bytes;
  };

  struct Request {
    std::int64_t bytes, segment_bytes;
    std::int32_t stream;
    bool small;
  };

  std::int64_t rounded(std::int64_t bytes) const;
  std::int64_t segment_bytes(std::int64_t bytes) const;
  Pool& pool(bool small, std::int32_t stream) { return pools_[stream][small]; }
  Pool& pool_of(const Block& block) { return pool(block.small, block.stream); }
  bool collects() const { return config_.garbage_collection_threshold > 0 && config_.allowed_bytes != kUnlimited; }

  std::int32_t add_held(Block block, std::int32_t previous);
  std::int32_t take_free(const Request& request);
  FreeList::Place prefer_less_room(const FreeList& free, FreeList::Place place) const;
  bool splits(const Block& block, std::int64_t bytes) const;
  std::int32_t split(std::int32_t block, std::int64_t bytes);

  std::int32_t grow(const Request& request);
  std::int32_t grow_range(const Request& request);
  std::int32_t find_room(const Request& request);
  bool has_room(std::int32_t block, std::int64_t bytes) const;
  bool map(std::int32_t block, std::int64_t bytes);
  void unmap(std::int32_t block);

  void collect_garbage();
  bool release_oversize(const Request& request);
  void release_unused(Pool& pool);
  void release(std::int32_t block);
  void finish_until(std::int64_t op) { pending_.finish_until(op, [&](std::int32_t block) { make_free(block); }); }
  void make_free(std::int32_t block);
  void merge(std::int32_t block, std::int32_t neighbour);
  void insert_free(std::int32_t block);
  void erase_free(const Block& block) { pool_of(block).free.erase(block.bytes, block.address); }
  void reserve(std::int64_t bytes);
  void give_back(std::int64_t bytes);

  void link(std::int32_t block, std::int32_t previous, std::int32_t next);

  AllocatorConfig config_;
  Rows<Block> blocks_;
  std::vector<std::array<Pool, 2>> pools_;        // by stream, then large and small
  std::vector<Range> ranges_;
  std::array<std::int64_t, 2> searches_{};        // of the large and the small pools, counted where blocks are collected
  PendingFrees pending_;
  std::int64_t reserved_ = 0, peak_reserved_ = 0, next_address_ = 0;
  std::int64_t device_allocs_ = 0, device_frees_ = 0, retries_ = 0;
};

}  // namespace memtune
