#include "vmm/stitcher.h"

#include <algorithm>
#include <utility>

namespace memtune::vmm {

Stitcher::~Stitcher() {
  for (std::int32_t s = 0; s < stitched_.size(); ++s) {
    const Stitched& stitched = stitched_[s];
    if (stitched.address == 0) continue;
    memory_.unmap(stitched.address, stitched.bytes);
    memory_.give_back(stitched.address, stitched.bytes);
  }
  for (std::int32_t p = 0; p < pieces_.size(); ++p) {
    pieces_[p].stitched.clear();
    if (!pieces_[p].chunks.empty()) release(p);
  }
}

Address Stitcher::allocate(std::int64_t bytes, std::int32_t stream) {
  bytes = in_chunks(bytes);
  Pool& pool = pools_[stream];
  const auto piece = pool.pieces.lower_bound({bytes, 0});
  const auto stitched = pool.stitched.lower_bound({bytes, 0});
  const bool have_piece = piece != pool.pieces.end(), have_stitched = stitched != pool.stitched.end();
  // GMLake's states S1 to S5 (Guo et al. 2024): exact, one block, several, with new memory,
  // none.
  if (have_piece && piece->first == bytes) return ++states_[0], use_piece(piece->second);
  if (have_stitched && stitched->first == bytes) return ++states_[0], use_stitched(stitched->second, bytes);
  if (have_piece) {
    const std::int32_t taken = piece->second;
    split(taken, bytes);
    return ++states_[1], use_piece(taken);
  }
  // A much larger stitched block would keep pieces that others could use.
  if (have_stitched && stitched->first / options_.reuse_limit <= bytes) return ++states_[1], use_stitched(stitched->second, bytes);
  // Mapping costs driver calls per chunk, which small requests never repay.
  if (options_.defragment && bytes >= options_.stitch_from_bytes && !pool.pieces.empty()) {
    if (const Address address = stitch(bytes, stream, true)) return address;
  }
  const std::int32_t made = grow(bytes, stream);
  if (made < 0) return ++states_[4], 0;
  return ++states_[3], use_piece(made);
}

Address Stitcher::allocate_last(std::int64_t bytes, std::int32_t stream) {
  bytes = in_chunks(bytes);
  memory_.synchronize();
  // The driver must not unmap what a kernel may still read.
  drop_unused(0);
  // After the synchronization no stream uses unused pieces, so any stream may take them. Pieces that are still stitched are partly used.
  for (std::int32_t p = 0; p < pieces_.size(); ++p) {
    Piece& piece = pieces_[p];
    if (piece.chunks.empty() || piece.in_use || piece.stream == stream || !piece.stitched.empty()) continue;
    pool_of(piece).pieces.erase({piece.bytes(), p});
    piece.stream = stream;
    pool_of(piece).pieces.emplace(piece.bytes(), p);
  }
  if (const Address address = stitch(bytes, stream, true)) return address;
  release_unused();
  const std::int32_t made = grow(bytes, stream);
  return made < 0 ? 0 : use_piece(made);
}

bool Stitcher::free(Address address) {
  const auto found = held_.find(address);
  if (found == held_.end()) return false;
  // The stitched addresses remain mapped: the next request of this size finds them (exact fit).
  for (const std::int32_t piece : found->second.pieces) mark(piece, false);
  if (found->second.stitched >= 0) stitched_[found->second.stitched].held = false;
  held_.erase(found);
  if (stitched_bytes_ > options_.most_stitched_bytes) drop_unused(options_.most_stitched_bytes);
  return true;
}

void Stitcher::release_unused() {
  memory_.synchronize();
  drop_unused(0);
  for (std::int32_t p = 0; p < pieces_.size(); ++p) {
    if (!pieces_[p].chunks.empty() && !pieces_[p].in_use && pieces_[p].stitched.empty()) release(p);
  }
}

std::int64_t Stitcher::unused_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [stream, pool] : pools_) {
    for (const auto& [size, piece] : pool.pieces) bytes += size;
  }
  return bytes;
}

void Stitcher::add_regions(std::vector<Region>& regions) const {
  for (std::int32_t p = 0; p < pieces_.size(); ++p) {
    const Piece& piece = pieces_[p];
    if (piece.chunks.empty()) continue;
    regions.push_back({piece.address, piece.bytes(), piece.stream, "piece", {{piece.address, piece.bytes(), piece.in_use}}});
  }
}

Address Stitcher::use_piece(std::int32_t piece) {
  mark(piece, true);
  held_[pieces_[piece].address] = {{piece}, -1};
  return pieces_[piece].address;
}

// Only the pieces at the front that the request needs are taken; the last of them is split where it is longer.
Address Stitcher::use_stitched(std::int32_t s, std::int64_t bytes) {
  std::vector<std::int32_t> taken;
  std::int64_t sum = 0;
  for (std::size_t i = 0; sum < bytes; ++i) {
    const std::int32_t piece = stitched_[s].pieces[i];
    if (pieces_[piece].bytes() > bytes - sum) split(piece, bytes - sum);  // Rule 4 leaves the front in place i
    taken.push_back(piece);
    sum += pieces_[piece].bytes();
  }
  for (const std::int32_t piece : taken) mark(piece, true);
  Stitched& block = stitched_[s];
  block.held = true;
  block.used = ++clock_;
  held_[block.address] = {std::move(taken), s};
  return block.address;
}

// Unused pieces, largest first, until they are enough; 0 where they are not and nothing may be added, or addresses have run out.
Address Stitcher::stitch(std::int64_t bytes, std::int32_t stream, bool may_grow) {
  std::vector<std::int32_t> found = gather(bytes, pools_[stream]);
  std::int64_t sum = 0;
  for (const std::int32_t piece : found) sum += pieces_[piece].bytes();
  if (sum < bytes) {
    const std::int32_t more = may_grow ? grow(bytes - sum, stream) : -1;
    if (more < 0) return 0;
    found.push_back(more);
  } else if (sum > bytes) {
    const std::int32_t last = found.back();
    split(last, pieces_[last].bytes() - (sum - bytes));
  }
  if (found.size() == 1) return ++states_[3], use_piece(found[0]);
  const std::int32_t block = new_stitched(std::move(found), bytes);
  if (block < 0) return 0;
  ++states_[sum < bytes ? 3 : 2];
  return use_stitched(block, bytes);
}

std::vector<std::int32_t> Stitcher::gather(std::int64_t bytes, Pool& pool) {
  std::vector<std::int32_t> found;
  std::int64_t sum = 0;
  for (auto each = pool.pieces.rbegin(); each != pool.pieces.rend() && sum < bytes; ++each) {
    found.push_back(each->second);
    sum += each->first;
  }
  return found;
}

std::int32_t Stitcher::grow(std::int64_t bytes, std::int32_t stream) {
  std::vector<Chunk> chunks = memory_.create(bytes / kChunkBytes);
  if (chunks.empty()) return -1;
  // Physical chunks first: without addresses they are returned below.
  const Address address = memory_.place(chunks);
  if (address == 0) {
    memory_.release(chunks);
    return -1;
  }
  const std::int32_t range = ranges_.add({address, bytes, bytes});
  const std::int32_t p = pieces_.add({address, std::move(chunks), stream, range, false, {}});
  pools_[stream].pieces.emplace(bytes, p);
  return p;
}

// The unused piece keeps its first `bytes`; the rest becomes a piece of its own.
std::int32_t Stitcher::split(std::int32_t p, std::int64_t bytes) {
  const std::int32_t q = pieces_.add({});
  Piece &front = pieces_[p], &back = pieces_[q];
  Pool& pool = pool_of(front);
  pool.pieces.erase({front.bytes(), p});
  const auto cut = front.chunks.begin() + bytes / kChunkBytes;
  back = {front.address + static_cast<Address>(bytes), {cut, front.chunks.end()}, front.stream, front.range, false, front.stitched};
  front.chunks.erase(cut, front.chunks.end());
  for (const std::int32_t s : front.stitched) {  // Rule 4
    auto& pieces = stitched_[s].pieces;
    pieces.insert(std::find(pieces.begin(), pieces.end(), p) + 1, q);
  }
  pool.pieces.emplace(front.bytes(), p);
  pool.pieces.emplace(back.bytes(), q);
  return q;
}

void Stitcher::mark(std::int32_t p, bool in_use) {
  Piece& piece = pieces_[p];
  Pool& pool = pool_of(piece);
  piece.in_use = in_use;
  if (in_use) {
    pool.pieces.erase({piece.bytes(), p});
  } else {
    pool.pieces.emplace(piece.bytes(), p);
  }
  for (const std::int32_t s : piece.stitched) {  // Rule 2
    Stitched& block = stitched_[s];
    block.busy += in_use ? 1 : -1;
    if (in_use && block.busy == 1) pool.stitched.erase({block.bytes, s});
    if (!in_use && block.busy == 0) pool.stitched.emplace(block.bytes, s);
  }
}

std::int32_t Stitcher::new_stitched(std::vector<std::int32_t> found, std::int64_t bytes) {
  std::vector<Chunk> chunks;
  for (const std::int32_t p : found) chunks.insert(chunks.end(), pieces_[p].chunks.begin(), pieces_[p].chunks.end());
  Address address = memory_.place(chunks);
  if (address == 0) {  // mappings or addresses have run out: those of unused blocks are given up
    drop_unused(0);
    address = memory_.place(chunks);
  }
  if (address == 0) return -1;
  const std::int32_t stream = pieces_[found[0]].stream;
  const std::int32_t s = stitched_.add({address, bytes, std::move(found), 0, false, ++clock_});
  for (const std::int32_t p : stitched_[s].pieces) pieces_[p].stitched.push_back(s);
  stitched_bytes_ += bytes;
  pools_[stream].stitched.emplace(bytes, s);
  return s;
}

// Takes the addresses of a stitched block away; its pieces stay as they are.
void Stitcher::drop(std::int32_t s) {
  Stitched& block = stitched_[s];
  for (const std::int32_t p : block.pieces) std::erase(pieces_[p].stitched, s);
  if (block.busy == 0) pool_of(pieces_[block.pieces[0]]).stitched.erase({block.bytes, s});
  memory_.unmap(block.address, block.bytes);
  memory_.give_back(block.address, block.bytes);
  stitched_bytes_ -= block.bytes;
  block = {};
  stitched_.give_up(s);
}

// Drops blocks whose address is not in use until at most `until_bytes` are left: first those with busy pieces, then the longest unused.
void Stitcher::drop_unused(std::int64_t until_bytes) {
  std::vector<std::pair<std::pair<bool, std::int64_t>, std::int32_t>> order;
  for (std::int32_t s = 0; s < stitched_.size(); ++s) {
    const Stitched& block = stitched_[s];
    if (block.address != 0 && !block.held) order.push_back({{block.busy == 0, block.used}, s});
  }
  if (order.empty() || stitched_bytes_ <= until_bytes) return;
  std::sort(order.begin(), order.end());
  memory_.synchronize();
  for (const auto& [age, s] : order) {
    if (stitched_bytes_ <= until_bytes) break;
    drop(s);
  }
}

void Stitcher::release(std::int32_t p) {
  Piece& piece = pieces_[p];
  if (!piece.in_use) pool_of(piece).pieces.erase({piece.bytes(), p});
  memory_.unmap(piece.address, piece.bytes());
  memory_.release(piece.chunks);
  Range& range = ranges_[piece.range];
  range.left -= piece.bytes();
  if (range.left == 0) {
    memory_.give_back(range.address, range.bytes);
    ranges_.give_up(piece.range);
  }
  piece = {};
  pieces_.give_up(p);
}

}  // namespace memtune::vmm
