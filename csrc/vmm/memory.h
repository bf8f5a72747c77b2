// The one door to a driver: counts calls and bytes, and makes ranges with memory in them whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "vmm/driver.h"

namespace memtune::vmm {

// Addresses with memory behind them, cut into blocks in ascending order.
struct Region {
  struct Part {
    Address address;
    std::int64_t bytes;
    bool in_use;
  };
  Address address;
  std::int64_t bytes;
  std::int32_t stream;  // -1: of several
  const char* kind;
  std::vector<Part> parts;
};

class Memory {
 public:
  Memory(std::unique_ptr<Driver> driver, std::int64_t limit_bytes) : driver_(std::move(driver)), limit_bytes_(limit_bytes) {}

  // `count` new chunks; none where the limit or the driver does not give all of them.
  std::vector<Chunk> create(std::int64_t count);
  void release(std::span<const Chunk> chunks);
  Address reserve(std::int64_t bytes);
  void give_back(Address address, std::int64_t bytes);
  bool map(Address address, std::span<const Chunk> chunks);
  void unmap(Address address, std::int64_t bytes);
  // A range of its own with these chunks in it, 0 where that cannot be had.
  Address place(std::span<const Chunk> chunks);
  void synchronize();
  void limit(std::int64_t bytes) { limit_bytes_ = bytes; }  // for what comes; what is there stays

  std::int64_t bytes() const { return bytes_; }            // of all chunks that exist
  std::int64_t peak_bytes() const { return peak_bytes_; }
  void restart_peak() { peak_bytes_ = bytes_; }
  std::int64_t calls() const { return calls_; }            // of the driver; a steady state makes none
  std::string fault() const { return driver_->fault(); }

 private:
  std::unique_ptr<Driver> driver_;
  std::int64_t limit_bytes_, bytes_ = 0, peak_bytes_ = 0, calls_ = 0;
};

inline std::int64_t in_chunks(std::int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes; }

}  // namespace memtune::vmm
