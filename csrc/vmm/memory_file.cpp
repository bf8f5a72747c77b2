// A file in memory as physical memory: a chunk is a place in the file, and may be mapped at several addresses at once.
#include "vmm/driver.h"

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace memtune::vmm {
namespace {

class MemoryFile final : public Driver {
 public:
  explicit MemoryFile(int file) : file_(file) {}
  ~MemoryFile() override { close(file_); }

  std::optional<Chunk> create() override {
    if (unused_.empty()) {
      if (ftruncate(file_, offset(next_ + 1)) != 0) return failed("ftruncate");
      return next_++;
    }
    const Chunk chunk = unused_.back();
    unused_.pop_back();
    return chunk;
  }

  void release(Chunk chunk) override {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset(chunk), kChunkBytes);
    unused_.push_back(chunk);
  }

  Address reserve(std::int64_t bytes) override {
    void* const at = mmap(nullptr, static_cast<std::size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) return reinterpret_cast<Address>(at);
    failed("mmap");
    return 0;
  }

  void give_back(Address address, std::int64_t bytes) override { munmap(pointer(address), static_cast<std::size_t>(bytes)); }

  bool map(Address address, std::span<const Chunk> chunks) override {
    // Neighbours in the file are mapped together: the kernel bounds how many mappings a process may have.
    for (std::size_t first = 0, last = 0; first < chunks.size(); first = last) {
      for (last = first + 1; last < chunks.size() && chunks[last] == chunks[last - 1] + 1;) ++last;
      const std::size_t bytes = (last - first) * kChunkBytes;
      const Address at = address + first * kChunkBytes;
      if (mmap(pointer(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, offset(chunks[first])) != MAP_FAILED) continue;
      failed("mmap");
      if (first > 0) unmap(address, static_cast<std::int64_t>(first * kChunkBytes));
      return false;
    }
    return true;
  }

  void unmap(Address address, std::int64_t bytes) override {
    mmap(pointer(address), static_cast<std::size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }

  void synchronize() override {}
  std::string fault() const override { return fault_; }

 private:
  static off_t offset(Chunk chunk) { return static_cast<off_t>(chunk * kChunkBytes); }
  static void* pointer(Address address) { return reinterpret_cast<void*>(address); }

  std::nullopt_t failed(const char* call) {
    fault_ = std::string(call) + ": " + std::strerror(errno);
    return std::nullopt;
  }

  int file_;
  Chunk next_ = 0;
  std::vector<Chunk> unused_;
  std::string fault_;
};

}  // namespace

std::unique_ptr<Driver> memory_file(std::string& why) {
  const int file = memfd_create("memtune", MFD_CLOEXEC);
  if (file >= 0) return std::make_unique<MemoryFile>(file);
  why = std::string("memfd_create: ") + std::strerror(errno);
  return nullptr;
}

}  // namespace memtune::vmm
#else
namespace memtune::vmm {
std::unique_ptr<Driver> memory_file(std::string& why) {
  why = "memory that is mapped in several places needs Linux";
  return nullptr;
}
}  // namespace memtune::vmm
#endif
