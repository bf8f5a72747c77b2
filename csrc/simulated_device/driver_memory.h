// Memory of simulated devices as a driver gives it to an allocator above: chunks, and addresses to which chunks are mapped. A chunk
// may be mapped to several addresses; the order of uses is that of its bytes, whatever address an op has taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "simulated_device/order.h"

namespace memtune::sim {

inline constexpr std::size_t kChunkBytes = std::size_t{2} << 20;
inline constexpr std::size_t kMappedBytes = std::size_t{1} << 45;  // addresses for all devices; each is handed out once

class DriverMemory {
 public:
  // Chunks of device i lie in `file`, and at the addresses [i * device_bytes, i * device_bytes + capacity_bytes) from `guarded` on.
  // Addresses to which they are mapped begin `mapped_at` after `guarded` and, for kernels, after `open`.
  DriverMemory(char* guarded, char* open, int file, std::size_t device_bytes, std::size_t capacity_bytes, std::size_t mapped_at)
      : guarded_(guarded), open_(open), file_(file), device_bytes_(device_bytes), capacity_bytes_(capacity_bytes), next_(mapped_at),
        end_(mapped_at + kMappedBytes) {}

  std::uintptr_t reserve(int device, std::size_t bytes);       // 0: no addresses left
  std::uintptr_t create(int device);                           // a chunk, named by its own address; 0: memory has run out
  void release(std::uintptr_t chunk);
  bool map(std::uintptr_t address, std::uintptr_t chunk);      // false: something is mapped there
  bool unmap(std::uintptr_t address, std::size_t bytes);       // false: nothing is
  // The bytes behind `range`, by the addresses of their chunks. Other memory is at its own address; empty: not mapped.
  std::vector<Range> behind(Range range) const;
  int device_of(std::uintptr_t address) const;                 // -1: not reserved
  void* for_kernels(std::uintptr_t address) const { return open_ + (address - reinterpret_cast<std::uintptr_t>(guarded_)); }

 private:
  std::size_t offset_of(std::uintptr_t address) const { return address - reinterpret_cast<std::uintptr_t>(guarded_); }

  char* guarded_;
  char* open_;
  int file_;
  std::size_t device_bytes_, capacity_bytes_, next_, end_;
  std::map<std::uintptr_t, int> reserved_;                      // first address: device
  std::map<std::uintptr_t, std::uintptr_t> mapped_;             // address: chunk
  std::map<int, std::size_t> made_;                             // chunks of a device so far
  std::map<int, std::vector<std::uintptr_t>> free_;
};

}  // namespace memtune::sim
