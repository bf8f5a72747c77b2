#include "simulator/caching_allocator.h"

#include <algorithm>
#include <bit>
#include <map>

namespace memtune {
namespace {

constexpr std::int64_t kVastBytes = std::int64_t{1} << 46;  // address range of a segment where memory has no end

std::int64_t round_up(std::int64_t bytes, std::int64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

CachingAllocator::CachingAllocator(const AllocatorConfig& config) : config_(config) {}

std::vector<std::int32_t> CachingAllocator::adopt(const HeldMemory& held) {
  std::vector<std::int32_t> used;
  std::map<std::pair<std::int32_t, bool>, std::int32_t> last;  // of each stream and pool, where segments expand: its last block
  std::size_t next = 0;
  for (std::size_t s = 0; s < held.segment_address.size(); ++s) {
    const std::int64_t from = held.segment_address[s], end = from + held.segment_bytes[s];
    Block block{.address = from, .bytes = 0, .searched = 0, .stream = held.segment_stream[s], .small = held.segment_small[s] != 0};
    if (static_cast<std::size_t>(block.stream) >= pools_.size()) pools_.resize(block.stream + 1);
    std::int32_t previous = -1;
    if (config_.expandable_segments) {
      const auto [pool, is_new] = last.try_emplace({block.stream, block.small}, -1);
      if (is_new) ranges_.push_back({from, 0, block.small ? kSmallSegmentBytes : config_.large_segment_bytes});
      previous = pool->second;
      block.range = is_new ? static_cast<std::int32_t>(ranges_.size()) - 1 : blocks_[previous].range;
      if (!is_new && blocks_[previous].address + blocks_[previous].bytes < from) {
        Block hole = block;
        hole.address = blocks_[previous].address + blocks_[previous].bytes;
        hole.bytes = from - hole.address;
        hole.mapped = false;
        previous = add_held(hole, previous);
      }
    }
    for (std::int64_t at = from; at < end;) {
      const bool more = next < held.block_address.size() && held.block_address[next] < end;
      block.in_use = more && held.block_address[next] == at;
      block.address = at;
      block.bytes = block.in_use ? held.block_bytes[next] : (more ? held.block_address[next] : end) - at;
      previous = add_held(block, previous);
      if (block.in_use) {
        used.push_back(previous);
        ++next;
      }
      at += block.bytes;
    }
    if (config_.expandable_segments) last[{block.stream, block.small}] = previous;
    reserved_ += end - from;
    next_address_ = std::max(next_address_, round_up(end, kRoundLargeBytes));
  }
  for (const auto& [pool, block] : last) {  // what is left of the addresses of a range
    Block rest = blocks_[block];
    Range& range = ranges_[rest.range];
    rest.address += rest.bytes;
    rest.bytes = kVastBytes;
    rest.in_use = rest.mapped = false;
    range.bytes = rest.address + rest.bytes - range.base;
    add_held(rest, block);
    next_address_ = std::max(next_address_, round_up(rest.address + rest.bytes, kRoundLargeBytes));
  }
  peak_reserved_ = reserved_;
  return used;
}

// A block behind `previous`, joined with it if both are free (Rule 2).
std::int32_t CachingAllocator::add_held(Block block, std::int32_t previous) {
  block.previous = block.next = -1;
  const std::int32_t index = blocks_.add(block);
  link(index, previous, -1);
  if (block.in_use) return index;
  merge(index, previous);
  if (block.mapped) insert_free(index);
  else pool_of(blocks_[index]).unmapped.emplace(blocks_[index].address, index);
  return index;
}

std::int32_t CachingAllocator::allocate(std::int64_t bytes, std::int32_t stream, std::int64_t op) {
  finish_until(op);
  if (static_cast<std::size_t>(stream) >= pools_.size()) pools_.resize(stream + 1);
  const std::int64_t size = rounded(bytes);
  // The pool is chosen by the rounded size, as torch's get_pool does.
  const Request request{size, segment_bytes(size), stream, size <= kSmallBytes};
  std::int32_t block = take_free(request);
  if (block < 0) {
    // In torch's order (malloc in CUDACachingAllocator.cpp): collect, new segment, oversize blocks, all
    // cached ones, out of memory.
    if (collects()) collect_garbage();
    block = grow(request);
    if (block < 0 && release_oversize(request)) block = grow(request);
    if (block < 0) {
      release_cached();
      ++retries_;
      block = grow(request);
    }
    if (block < 0) return -1;
  }
  if (splits(blocks_[block], size)) block = split(block, size);
  blocks_[block].in_use = true;
  return block;
}

void CachingAllocator::release_cached() {
  finish_until(kUnlimited);
  for (auto& pools : pools_) {
    for (Pool& pool : pools) release_unused(pool);
  }
}

std::int64_t CachingAllocator::largest_free_bytes() const {
  std::int64_t most = 0;
  for (const auto& pools : pools_) {
    for (const Pool& pool : pools) {
      if (!pool.free.empty()) most = std::max(most, pool.free.largest().bytes);
    }
  }
  return most;
}

// Sizes

std::int64_t CachingAllocator::rounded(std::int64_t bytes) const {
  if (bytes < kMinBlockBytes) return kMinBlockBytes;
  // PYTORCH_CUDA_ALLOC_CONF has one number of divisions per power of two, from 1 MiB on.
  const int power = std::bit_width(static_cast<std::uint64_t>(bytes)) - 1;
  const std::int64_t divisions = config_.roundup_divisions[std::clamp(power - 20, 0, static_cast<int>(kRoundupIntervals) - 1)];
  if (divisions <= 1 || bytes <= kMinBlockBytes * divisions) return round_up(bytes, kMinBlockBytes);
  // Between two powers of two lie `divisions` equal parts; both are powers of two, and bytes > 512 * divisions, so a part is
  // never smaller than 512.
  return round_up(bytes, (std::int64_t{1} << power) / divisions);
}

std::int64_t CachingAllocator::segment_bytes(std::int64_t bytes) const {
  if (bytes <= kSmallBytes) return kSmallSegmentBytes;
  return bytes < kMinLargeBytes ? config_.large_segment_bytes : round_up(bytes, kRoundLargeBytes);
}

// From what is free

std::int32_t CachingAllocator::take_free(const Request& request) {
  if (collects()) ++searches_[request.small];
  FreeList& free = pool(request.small, request.stream).free;
  FreeList::Place place = free.lower_bound(request.bytes, 0);
  if (!free.holds(place)) return -1;
  if (config_.expandable_segments) place = prefer_less_room(free, place);
  const auto [bytes, address, block] = free.at(place);
  const bool oversize = request.bytes >= config_.max_split_bytes;
  // Oversize blocks are never split, so smaller requests must leave them.
  if (!oversize && bytes >= config_.max_split_bytes) return -1;
  // An oversize request takes a whole block; torch allows it to waste this much (20 MiB).
  if (oversize && bytes >= request.bytes + config_.max_non_split_rounding_bytes) return -1;
  free.erase(place);
  return block;
}

// A block at the end of the mapped part counts with the room it can grow into, so that the end is used last.
FreeList::Place CachingAllocator::prefer_less_room(const FreeList& free, FreeList::Place place) const {
  const auto room = [&](FreeList::Place at) {
    const Block& block = blocks_[free.at(at).block];
    return block.bytes + (block.next >= 0 && !blocks_[block.next].mapped ? blocks_[block.next].bytes : 0);
  };
  for (FreeList::Place next = free.after(place); free.holds(next) && room(next) < room(place); next = free.after(next)) {
    place = next;
  }
  return place;
}

bool CachingAllocator::splits(const Block& block, std::int64_t bytes) const {
  const std::int64_t rest = block.bytes - bytes;
  // torch's should_split: the rest of a large
  // block must exceed 1 MiB, or it would be useless to the large pool.
  if (block.small || config_.expandable_segments) return rest >= kMinBlockBytes;
  return bytes < config_.max_split_bytes && rest > kSmallBytes;
}

// The first `bytes` of a block as a block of their own; the rest becomes free.
std::int32_t CachingAllocator::split(std::int32_t block, std::int64_t bytes) {
  Block front = blocks_[block];
  front.bytes = bytes;
  const std::int32_t index = blocks_.add(front);
  Block& rest = blocks_[block];
  link(index, rest.previous, block);
  rest.address += bytes;
  rest.bytes -= bytes;
  insert_free(block);
  return index;
}

// From the driver

std::int32_t CachingAllocator::grow(const Request& request) {
  // set_per_process_memory_fraction limits reserved bytes, not allocated ones.
  if (request.segment_bytes > config_.allowed_bytes - reserved_) return -1;
  if (config_.expandable_segments) return grow_range(request);
  if (request.segment_bytes > config_.capacity_bytes - reserved_) return -1;
  const Block block{.address = next_address_, .bytes = request.segment_bytes, .searched = 0, .stream = request.stream,
                    .small = request.small};
  next_address_ += round_up(request.segment_bytes, kRoundLargeBytes);
  reserve(request.segment_bytes);
  return blocks_.add(block);
}

std::int32_t CachingAllocator::grow_range(const Request& request) {
  std::int32_t block = find_room(request);
  // The block that find_room returns is free, or unmapped, or free and followed by an unmapped one.
  if (!blocks_[block].mapped && !map(block, std::min(blocks_[block].bytes, request.bytes))) return -1;
  while (blocks_[block].bytes < request.bytes) {
    const std::int32_t next = blocks_[block].next;
    if (next < 0 || !map(next, std::min(request.bytes - blocks_[block].bytes, blocks_[next].bytes))) return -1;
    block = next;  // it took the mapped one before it in
  }
  erase_free(blocks_[block]);
  return block;
}

// The block at the lowest address from which free and unmapped addresses suffice, in a new range if there is none.
std::int32_t CachingAllocator::find_room(const Request& request) {
  Pool& pool = this->pool(request.small, request.stream);
  // By address, as torch does: the front of a range fills before its end grows.
  for (const auto& [address, block] : pool.unmapped) {
    const std::int32_t before = blocks_[block].previous;
    const std::int32_t start = before >= 0 && !blocks_[before].in_use ? before : block;
    if (has_room(start, request.bytes)) return start;
  }
  const std::int64_t page = request.small ? kSmallSegmentBytes : config_.large_segment_bytes;
  const std::int64_t capacity = config_.capacity_bytes;
  // torch reserves addresses for 1 1/8 of the device's memory per segment.
  const std::int64_t bytes = round_up(capacity > kVastBytes ? kVastBytes : capacity + capacity / 8, page);
  ranges_.push_back({next_address_, bytes, page});
  const std::int32_t block = blocks_.add({.address = next_address_, .bytes = bytes, .searched = 0, .stream = request.stream,
                                        .range = static_cast<std::int32_t>(ranges_.size()) - 1, .small = request.small,
                                        .mapped = false});
  next_address_ += round_up(bytes, kRoundLargeBytes);
  pool.unmapped.emplace(blocks_[block].address, block);
  return block;
}

bool CachingAllocator::has_room(std::int32_t block, std::int64_t bytes) const {
  for (; bytes > 0 && block >= 0 && !blocks_[block].in_use; block = blocks_[block].next) bytes -= blocks_[block].bytes;
  return bytes <= 0;
}

// Maps the pages that hold the first `bytes` of an unmapped block, all or none.
bool CachingAllocator::map(std::int32_t block, std::int64_t bytes) {
  const Range& range = ranges_[blocks_[block].range];
  const std::int64_t mapped = round_up(bytes, range.page_bytes);
  // Memory is mapped in whole pages, 2 MiB in the small pool and 20 MiB in the large one.
  if (mapped > config_.capacity_bytes - reserved_) return false;
  Pool& pool = pool_of(blocks_[block]);
  pool.unmapped.erase({blocks_[block].address, block});
  if (mapped < blocks_[block].bytes) {
    Block rest = blocks_[block];
    rest.address += mapped;
    rest.bytes -= mapped;
    const std::int32_t index = blocks_.add(rest);
    link(index, block, blocks_[block].next);
    pool.unmapped.emplace(rest.address, index);
    blocks_[block].bytes = mapped;
  }
  blocks_[block].mapped = true;
  merge(block, blocks_[block].previous);
  merge(block, blocks_[block].next);
  insert_free(block);
  reserve(mapped);
  return true;
}

// Unmaps the pages that lie entirely in a free block.
void CachingAllocator::unmap(std::int32_t block) {
  const Block whole = blocks_[block];
  const Range& range = ranges_[whole.range];
  const std::int64_t from = range.base + round_up(whole.address - range.base, range.page_bytes);
  const std::int64_t end = whole.address + whole.bytes;
  const std::int64_t to = range.base + (end - range.base) / range.page_bytes * range.page_bytes;
  // No whole page is free, and the driver takes no part of one back.
  if (from >= to) return;
  erase_free(whole);
  blocks_[block].address = from;
  blocks_[block].bytes = to - from;
  if (from > whole.address) {
    Block before = whole;
    before.bytes = from - whole.address;
    const std::int32_t index = blocks_.add(before);
    link(index, whole.previous, block);
    insert_free(index);
  }
  if (end > to) {
    Block after = whole;
    after.address = to;
    after.bytes = end - to;
    const std::int32_t index = blocks_.add(after);
    link(index, block, whole.next);
    insert_free(index);
  }
  blocks_[block].mapped = false;
  merge(block, blocks_[block].previous);
  merge(block, blocks_[block].next);
  pool_of(blocks_[block]).unmapped.emplace(blocks_[block].address, block);
  give_back(to - from);
}

// Back to the driver

// Releases large segments that have been unused for longer than the average, until the target is met.
void CachingAllocator::collect_garbage() {
  const double share = config_.garbage_collection_threshold;
  // torch's garbage_collection_threshold is a part of the allowed memory.
  const auto threshold = static_cast<std::int64_t>(share * static_cast<double>(config_.allowed_bytes));
  if (reserved_ <= threshold) return;
  const std::int64_t target = reserved_ - threshold;
  std::vector<std::int32_t> whole;
  std::int64_t total_age = 0, reclaimed = 0;
  // Measured in searches of the large pool since the block became free (torch's gc_count).
  const auto age = [&](std::int32_t block) { return searches_[0] - blocks_[block].searched; };
  for (const auto& pools : pools_) {
    pools[0].free.for_each([&](const FreeList::Entry& entry) {
      const Block& block = blocks_[entry.block];
      // Only a segment without a block in use can go back to
      // the driver.
      if (block.previous >= 0 || block.next >= 0 || block.range >= 0) return;
      whole.push_back(entry.block);
      total_age += age(entry.block);
    });
  }
  while (reclaimed < target && !whole.empty()) {
    const double average = static_cast<double>(total_age) / static_cast<double>(whole.size());
    std::vector<std::int32_t> kept;
    for (const std::int32_t block : whole) {
      if (static_cast<double>(age(block)) < average) {
        kept.push_back(block);
        continue;
      }
      reclaimed += blocks_[block].bytes;
      total_age -= age(block);
      release(block);
    }
    whole.swap(kept);
  }
}

// Under max_split_size: gives back one free block that is large enough, or the largest ones until they are together.
bool CachingAllocator::release_oversize(const Request& request) {
  if (config_.max_split_bytes == kUnlimited) return false;
  const FreeList& free = pool(request.small, request.stream).free;
  const std::int64_t wanted = std::max(request.bytes, config_.max_split_bytes);
  FreeList::Place place = free.lower_bound(wanted, 0);
  if (free.holds(place) && blocks_[free.at(place).block].range < 0) {
    release(free.at(place).block);
    return true;
  }
  std::vector<std::int32_t> chosen;
  std::int64_t total = 0;
  while (total < wanted && free.step_back(place) && free.at(place).bytes >= config_.max_split_bytes) {
    if (blocks_[free.at(place).block].range >= 0) continue;
    chosen.push_back(free.at(place).block);
    total += free.at(place).bytes;
  }
  for (const std::int32_t block : chosen) release(block);
  return total >= wanted;
}

void CachingAllocator::release_unused(Pool& pool) {
  std::vector<std::int32_t> free;
  pool.free.for_each([&](const FreeList::Entry& entry) { free.push_back(entry.block); });
  for (const std::int32_t block : free) {
    if (blocks_[block].range >= 0) {
      unmap(block);
      const Block& left = blocks_[block];
      if (left.previous >= 0 || left.next >= 0 || left.mapped) continue;
      pool.unmapped.erase({left.address, block});  // nothing of the range is mapped any more: its addresses go as well
      blocks_.give_up(block);
    } else if (blocks_[block].previous < 0 && blocks_[block].next < 0) {
      release(block);
    }
  }
}

void CachingAllocator::release(std::int32_t block) {
  erase_free(blocks_[block]);
  give_back(blocks_[block].bytes);
  blocks_.give_up(block);
}

// Bookkeeping

void CachingAllocator::make_free(std::int32_t block) {
  blocks_[block].in_use = false;
  merge(block, blocks_[block].previous);
  merge(block, blocks_[block].next);
  insert_free(block);
}

// Takes a neighbour into `block`, which is in no list yet, if Rule 2 asks for it.
void CachingAllocator::merge(std::int32_t block, std::int32_t neighbour) {
  if (neighbour < 0) return;
  Block& into = blocks_[block];
  const Block& from = blocks_[neighbour];
  if (from.in_use || from.mapped != into.mapped) return;
  if (from.mapped) {
    erase_free(from);
  } else {
    pool_of(from).unmapped.erase({from.address, neighbour});
  }
  into.bytes += from.bytes;
  if (into.previous == neighbour) {
    into.address = from.address;
    link(block, from.previous, into.next);
  } else {
    link(block, into.previous, from.next);
  }
  blocks_.give_up(neighbour);
}

void CachingAllocator::insert_free(std::int32_t index) {
  Block& block = blocks_[index];
  block.searched = searches_[block.small];
  pool_of(block).free.insert({block.bytes, block.address, index});
}

void CachingAllocator::reserve(std::int64_t bytes) {
  reserved_ += bytes;
  peak_reserved_ = std::max(peak_reserved_, reserved_);
  ++device_allocs_;
}

void CachingAllocator::give_back(std::int64_t bytes) {
  reserved_ -= bytes;
  ++device_frees_;
}

void CachingAllocator::link(std::int32_t block, std::int32_t previous, std::int32_t next) {
  blocks_[block].previous = previous;
  blocks_[block].next = next;
  if (previous >= 0) blocks_[previous].next = block;
  if (next >= 0) blocks_[next].previous = block;
}

}  // namespace memtune
