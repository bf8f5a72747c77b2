// An expandable arena: blocks of any size in one long range of addresses, into which memory is mapped as it is needed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "vmm/memory.h"
#include "vmm/steps.h"

namespace memtune::vmm {

// Rules:
// 1. Blocks cover the range without gaps; no two neighbours are both free.
// 2. The smallest free block that is large enough is taken, the lowest of equals: what never had memory is the largest and last.
class Arena {
 public:
  Arena(Memory& memory, std::int64_t range_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Address allocate(std::int64_t bytes);  // 0: no memory
  bool free(Address address);            // false: no block of this arena
  void add_regions(std::int32_t stream, std::vector<Region>& regions) const;
  void trim();                           // releases memory without blocks in use; the device must be idle on it

 private:
  struct Block {
    std::int64_t bytes;
    bool in_use = false;
  };
  using Blocks = std::map<Address, Block>;

  bool ensure(Address address, std::int64_t bytes);
  void insert_free(Blocks::iterator block) { free_.emplace(block->second.bytes, block->first); }
  void erase_free(Blocks::iterator block) { free_.erase({block->second.bytes, block->first}); }

  Memory& memory_;
  std::int64_t range_bytes_;
  Address base_ = 0;
  Blocks blocks_;
  std::set<std::pair<std::int64_t, Address>> free_;
  std::map<Address, Chunk> pages_;
};

}  // namespace memtune::vmm
