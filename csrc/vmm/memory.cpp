#include "vmm/memory.h"

#include <algorithm>

namespace memtune::vmm {

std::vector<Chunk> Memory::create(std::int64_t count) {
  std::vector<Chunk> made;
  if (bytes_ + count * kChunkBytes > limit_bytes_) return made;
  while (static_cast<std::int64_t>(made.size()) < count) {
    ++calls_;
    const std::optional<Chunk> chunk = driver_->create();
    if (!chunk) {
      release(made);
      return {};
    }
    bytes_ += kChunkBytes;
    made.push_back(*chunk);
  }
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  return made;
}

void Memory::release(std::span<const Chunk> chunks) {
  for (const Chunk chunk : chunks) driver_->release(chunk);
  calls_ += static_cast<std::int64_t>(chunks.size());
  bytes_ -= static_cast<std::int64_t>(chunks.size()) * kChunkBytes;
}

Address Memory::reserve(std::int64_t bytes) {
  ++calls_;
  return driver_->reserve(bytes);
}

void Memory::give_back(Address address, std::int64_t bytes) {
  ++calls_;
  driver_->give_back(address, bytes);
}

bool Memory::map(Address address, std::span<const Chunk> chunks) {
  calls_ += static_cast<std::int64_t>(chunks.size());
  return driver_->map(address, chunks);
}

void Memory::unmap(Address address, std::int64_t bytes) {
  ++calls_;
  driver_->unmap(address, bytes);
}

Address Memory::place(std::span<const Chunk> chunks) {
  const auto bytes = static_cast<std::int64_t>(chunks.size()) * kChunkBytes;
  const Address address = reserve(bytes);
  if (address == 0 || map(address, chunks)) return address;
  give_back(address, bytes);
  return 0;
}

void Memory::synchronize() {
  ++calls_;
  driver_->synchronize();
}

}  // namespace memtune::vmm
