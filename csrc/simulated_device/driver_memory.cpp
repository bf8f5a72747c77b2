#include "simulated_device/driver_memory.h"

#include <sys/mman.h>

#include <algorithm>

namespace memtune::sim {

std::uintptr_t DriverMemory::reserve(int device, std::size_t bytes) {
  if (bytes > end_ - next_) return 0;
  const auto address = reinterpret_cast<std::uintptr_t>(guarded_ + next_);
  next_ += bytes;
  reserved_[address] = device;
  return address;
}

std::uintptr_t DriverMemory::create(int device) {
  auto& free = free_[device];
  if (!free.empty()) {
    const std::uintptr_t chunk = free.back();
    free.pop_back();
    return chunk;
  }
  if ((made_[device] + 1) * kChunkBytes > capacity_bytes_) return 0;
  return reinterpret_cast<std::uintptr_t>(guarded_ + device * device_bytes_ + made_[device]++ * kChunkBytes);
}

void DriverMemory::release(std::uintptr_t chunk) { free_[static_cast<int>(offset_of(chunk) / device_bytes_)].push_back(chunk); }

bool DriverMemory::map(std::uintptr_t address, std::uintptr_t chunk) {
  if (device_of(address) < 0 || !mapped_.emplace(address, chunk).second) return false;
  return mmap(for_kernels(address), kChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
              static_cast<off_t>(offset_of(chunk))) != MAP_FAILED;
}

bool DriverMemory::unmap(std::uintptr_t address, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kChunkBytes) {
    if (mapped_.erase(address + at) == 0) return false;
  }
  return mmap(for_kernels(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

std::vector<Range> DriverMemory::behind(Range range) const {
  if (device_of(range.begin) < 0) return {range};
  std::vector<Range> found;
  while (range.begin < range.end) {
    auto piece = mapped_.upper_bound(range.begin);
    if (piece == mapped_.begin()) return {};
    --piece;
    const std::uintptr_t end = std::min(range.end, piece->first + kChunkBytes);
    if (end <= range.begin) return {};
    const std::uintptr_t at = piece->second + (range.begin - piece->first);
    if (!found.empty() && found.back().end == at) found.back().end += end - range.begin;
    else found.push_back({at, at + (end - range.begin)});
    range.begin = end;
  }
  return found;
}

int DriverMemory::device_of(std::uintptr_t address) const {
  auto found = reserved_.upper_bound(address);
  if (found == reserved_.begin() || offset_of(address) >= next_) return -1;
  return std::prev(found)->second;
}

}  // namespace memtune::sim
