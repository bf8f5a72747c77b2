// Virtual-memory stitching after GMLake (Guo et al., ASPLOS 2024): free pieces of physical memory, wherever they are, become one
// block of addresses. Blocks are multiples of chunks and belong to one stream.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "rows.h"
#include "vmm/memory.h"

namespace memtune::vmm {

struct StitchOptions {
  bool defragment = true;                          // false: pieces are split, never stitched
  std::int64_t stitch_from_bytes = 0;              // smaller requests are stitched only where memory has run out
  std::int64_t reuse_limit = 10;                   // a stitched block serves requests of at least this part of its size
  std::int64_t most_stitched_bytes = std::int64_t{1} << 40;  // addresses in stitched blocks; beyond it the oldest unused ones go
};

// A *piece* (the paper's pBlock) owns chunks and has addresses of its own; a *stitched* block (sBlock) is a second range of addresses
// over the chunks of several pieces. Rules:
// 1. A chunk belongs to one piece. A piece is in use or not; a stitched block may be used only if none of its pieces is in use.
// 2. Using either marks the pieces, and thereby every other stitched block that has one of them, as in use.
// 3. Freeing marks and never unmaps; pieces are never joined again: stitching takes the place of that.
// 4. Where a piece is split, every stitched block over it has both halves in its place: addresses stay as they are.
class Stitcher {
 public:
  Stitcher(Memory& memory, StitchOptions options) : memory_(memory), options_(options) {}
  ~Stitcher();
  Stitcher(const Stitcher&) = delete;
  Stitcher& operator=(const Stitcher&) = delete;

  // The states of the paper, in this order: S1 a block of exactly this size, S2 a larger piece is split (or the front of a larger
  // stitched block is taken), S3 pieces are stitched, S4 pieces and new chunks are stitched, else new chunks alone. 0: S5, none of it.
  Address allocate(std::int64_t bytes, std::int32_t stream);
  // The same where memory has run out: unused memory of all streams is taken, whatever the options. Waits for the device.
  Address allocate_last(std::int64_t bytes, std::int32_t stream);
  bool free(Address address);  // false: nothing is in use there
  void release_unused();       // gives all memory back that is not in use; waits for the device

  void add_regions(std::vector<Region>& regions) const;  // one for each piece
  std::int64_t stitched_bytes() const { return stitched_bytes_; }
  std::int64_t unused_bytes() const;
  // How often each state was reached, S1 to S5.
  const std::int64_t (&states() const)[5] { return states_; }

 private:
  struct Piece {
    Address address = 0;
    std::vector<Chunk> chunks;  // empty: the row is free
    std::int32_t stream = 0;
    std::int32_t range = -1;
    bool in_use = false;
    std::vector<std::int32_t> stitched;
    std::int64_t bytes() const { return static_cast<std::int64_t>(chunks.size()) * kChunkBytes; }
  };
  struct Stitched {
    Address address = 0;  // 0: the row is free
    std::int64_t bytes = 0;
    std::vector<std::int32_t> pieces;
    std::int32_t busy = 0;  // pieces in use
    bool held = false;      // its address is in use
    std::int64_t used = 0;  // when last
  };
  // Addresses that were reserved at once; given back when the last piece is gone.
  struct Range {
    Address address = 0;
    std::int64_t bytes = 0, left = 0;
  };
  struct Held {
    std::vector<std::int32_t> pieces;
    std::int32_t stitched = -1;
  };
  using Sizes = std::set<std::pair<std::int64_t, std::int32_t>>;
  struct Pool {
    Sizes pieces, stitched;  // unused ones by size
  };

  Address use_piece(std::int32_t piece);
  Address use_stitched(std::int32_t stitched, std::int64_t bytes);
  Address stitch(std::int64_t bytes, std::int32_t stream, bool grow);
  std::vector<std::int32_t> gather(std::int64_t bytes, Pool& pool);
  std::int32_t grow(std::int64_t bytes, std::int32_t stream);
  std::int32_t split(std::int32_t piece, std::int64_t bytes);
  void mark(std::int32_t piece, bool in_use);
  std::int32_t new_stitched(std::vector<std::int32_t> pieces, std::int64_t bytes);
  void drop(std::int32_t stitched);
  void drop_unused(std::int64_t until_bytes);
  void release(std::int32_t piece);
  Pool& pool_of(const Piece& piece) { return pools_[piece.stream]; }

  Memory& memory_;
  StitchOptions options_;
  Rows<Piece> pieces_;
  Rows<Stitched> stitched_;
  Rows<Range> ranges_;
  std::map<std::int32_t, Pool> pools_;
  std::unordered_map<Address, Held> held_;
  std::int64_t stitched_bytes_ = 0, clock_ = 0;
  std::int64_t states_[5] = {};
};

}  // namespace memtune::vmm
