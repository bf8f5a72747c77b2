#include "vmm/arena.h"

#include <algorithm>
#include <iterator>

namespace memtune::vmm {

Arena::Arena(Memory& memory, std::int64_t range_bytes) : memory_(memory), range_bytes_(range_bytes), base_(memory.reserve(range_bytes)) {
  if (base_ != 0) insert_free(blocks_.emplace(base_, Block{range_bytes}).first);
}

Arena::~Arena() {
  for (const auto& [address, chunk] : pages_) {
    memory_.unmap(address, kChunkBytes);
    memory_.release({&chunk, 1});
  }
  if (base_ != 0) memory_.give_back(base_, range_bytes_);
}

Address Arena::allocate(std::int64_t bytes) {
  bytes = in_blocks(bytes);
  const auto found = free_.lower_bound({bytes, 0});  // Rule 2
  if (found == free_.end() || !ensure(found->second, bytes)) return 0;
  const auto block = blocks_.find(found->second);
  erase_free(block);
  if (block->second.bytes > bytes) {
    insert_free(blocks_.emplace(block->first + static_cast<Address>(bytes), Block{block->second.bytes - bytes}).first);
    block->second.bytes = bytes;
  }
  block->second.in_use = true;
  return block->first;
}

bool Arena::free(Address address) {
  auto block = blocks_.find(address);
  if (block == blocks_.end() || !block->second.in_use) return false;
  block->second.in_use = false;
  const auto next = std::next(block);
  if (next != blocks_.end() && !next->second.in_use) {
    erase_free(next);
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin() && !std::prev(block)->second.in_use) {
    const auto previous = std::prev(block);
    erase_free(previous);
    previous->second.bytes += block->second.bytes;
    blocks_.erase(block);
    block = previous;
  }
  insert_free(block);
  return true;
}

// Memory under [address, address + bytes), as far as there is none yet; false and nothing changed where it cannot be had.
bool Arena::ensure(Address address, std::int64_t bytes) {
  std::vector<Address> missing;
  const Address end = address + static_cast<Address>(bytes);
  for (Address page = address - (address - base_) % kChunkBytes; page < end; page += kChunkBytes) {
    if (!pages_.contains(page)) missing.push_back(page);
  }
  if (missing.empty()) return true;
  const std::vector<Chunk> chunks = memory_.create(static_cast<std::int64_t>(missing.size()));
  if (chunks.empty()) return false;
  for (std::size_t i = 0; i < missing.size(); ++i) {
    if (!memory_.map(missing[i], {&chunks[i], 1})) {
      for (std::size_t done = 0; done < i; ++done) {
        memory_.unmap(missing[done], kChunkBytes);
        pages_.erase(missing[done]);
      }
      memory_.release(chunks);
      return false;
    }
    pages_.emplace(missing[i], chunks[i]);
  }
  return true;
}

void Arena::trim() {
  for (const auto& [address, block] : blocks_) {
    if (block.in_use) continue;
    const Address end = address + static_cast<Address>(block.bytes);
    auto page = pages_.lower_bound(base_ + (address - base_ + kChunkBytes - 1) / kChunkBytes * kChunkBytes);
    while (page != pages_.end() && page->first + kChunkBytes <= end) {
      memory_.unmap(page->first, kChunkBytes);
      memory_.release({&page->second, 1});
      page = pages_.erase(page);
    }
  }
}

// A region for each run of pages; blocks reach beyond where they are free and have no memory there.
void Arena::add_regions(std::int32_t stream, std::vector<Region>& regions) const {
  for (auto page = pages_.begin(); page != pages_.end();) {
    Region region{page->first, 0, stream, "arena", {}};
    for (; page != pages_.end() && page->first == region.address + static_cast<Address>(region.bytes); ++page) region.bytes += kChunkBytes;
    const Address end = region.address + static_cast<Address>(region.bytes);
    for (auto block = std::prev(blocks_.upper_bound(region.address)); block != blocks_.end() && block->first < end; ++block) {
      const Address from = std::max(block->first, region.address), to = std::min(block->first + static_cast<Address>(block->second.bytes), end);
      region.parts.push_back({from, static_cast<std::int64_t>(to - from), block->second.in_use});
    }
    regions.push_back(std::move(region));
  }
}

}  // namespace memtune::vmm
