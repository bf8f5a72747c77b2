// A simulated driver: a table of the chunk mapped at each address. Throws std::logic_error on calls that a real driver would refuse.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "vmm/driver.h"

namespace memtune::vmm {
namespace {

class PageTable final : public Driver {
 public:
  explicit PageTable(std::int64_t capacity_bytes) : free_chunks_(capacity_bytes / kChunkBytes) {}

  std::optional<Chunk> create() override {
    if (free_chunks_ == 0) return std::nullopt;
    --free_chunks_;
    mapped_.emplace(next_chunk_, 0);
    return next_chunk_++;
  }

  void release(Chunk chunk) override {
    const auto found = mapped_.find(chunk);
    require(found != mapped_.end() && found->second == 0, "a chunk that does not exist or is mapped is released");
    mapped_.erase(found);
    ++free_chunks_;
  }

  Address reserve(std::int64_t bytes) override {
    require(bytes > 0 && bytes % kChunkBytes == 0, "a range is no multiple of chunks");
    const Address address = next_address_;
    next_address_ += static_cast<Address>(bytes + kChunkBytes);  // a gap: one range never runs into the next
    ranges_.emplace(address, bytes);
    return address;
  }

  void give_back(Address address, std::int64_t bytes) override {
    const auto range = ranges_.find(address);
    require(range != ranges_.end() && range->second == bytes, "a range is given back that was not reserved so");
    const auto page = pages_.lower_bound(address);
    require(page == pages_.end() || page->first >= address + static_cast<Address>(bytes), "a range is given back with memory in it");
    ranges_.erase(range);
  }

  bool map(Address address, std::span<const Chunk> chunks) override {
    inside(address, static_cast<std::int64_t>(chunks.size()) * kChunkBytes);
    for (const Chunk chunk : chunks) {
      require(mapped_.contains(chunk), "a chunk that does not exist is mapped");
      require(pages_.emplace(address, chunk).second, "memory is mapped over other memory");
      ++mapped_[chunk];
      address += kChunkBytes;
    }
    return true;
  }

  void unmap(Address address, std::int64_t bytes) override {
    inside(address, bytes);
    for (const Address end = address + static_cast<Address>(bytes); address < end; address += kChunkBytes) {
      const auto page = pages_.find(address);
      require(page != pages_.end(), "an address without memory is unmapped");
      --mapped_[page->second];
      pages_.erase(page);
    }
  }

  void synchronize() override {}

 private:
  static void require(bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
  }

  void inside(Address address, std::int64_t bytes) const {
    auto range = ranges_.upper_bound(address);
    require(range != ranges_.begin() && address % kChunkBytes == 0 && bytes % kChunkBytes == 0, "no range at this address");
    --range;
    require(address + static_cast<Address>(bytes) <= range->first + static_cast<Address>(range->second), "beyond the end of a range");
  }

  std::int64_t free_chunks_;
  Chunk next_chunk_ = 1;
  Address next_address_ = Address{1} << 40;
  std::map<Address, std::int64_t> ranges_;
  std::map<Address, Chunk> pages_;
  std::unordered_map<Chunk, std::int64_t> mapped_;  // in how many places
};

}  // namespace

std::unique_ptr<Driver> page_table(std::int64_t capacity_bytes) { return std::make_unique<PageTable>(capacity_bytes); }

}  // namespace memtune::vmm
