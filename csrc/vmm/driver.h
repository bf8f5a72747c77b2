// Physical memory in chunks, and ranges of virtual addresses onto which chunks are mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace memtune::vmm {

inline constexpr std::int64_t kChunkBytes = 2 << 20;  // the granularity of CUDA's driver; all ranges are multiples of it

using Address = std::uintptr_t;  // 0: none
using Chunk = std::uint64_t;

// The interface to physical memory. No function throws: failures are empty results.
class Driver {
 public:
  virtual ~Driver() = default;
  virtual std::optional<Chunk> create() = 0;  // one chunk, nothing where memory has run out
  virtual void release(Chunk chunk) = 0;      // mapped nowhere
  virtual Address reserve(std::int64_t bytes) = 0;  // a range without memory, 0 where there are no addresses left
  virtual void give_back(Address address, std::int64_t bytes) = 0;  // exactly as reserved, nothing mapped
  // Maps chunks one after the other from `address` on, to be read and written; a chunk may be mapped in several places.
  virtual bool map(Address address, std::span<const Chunk> chunks) = 0;
  virtual void unmap(Address address, std::int64_t bytes) = 0;
  virtual void synchronize() = 0;  // returns when the device uses none of the memory
  virtual std::string fault() const { return ""; }  // message of the last failed call
};

// Each is made or not: `why` then says why not.
std::unique_ptr<Driver> page_table(std::int64_t capacity_bytes);  // simulated: no memory behind the addresses
std::unique_ptr<Driver> memory_file(std::string& why);            // Linux: a file in memory, mapped where it is wanted
std::unique_ptr<Driver> cuda_driver(int device, std::string& why);

}  // namespace memtune::vmm
