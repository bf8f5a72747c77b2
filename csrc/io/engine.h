// Reads and writes of tensors in files: split into blocks, of which a number is in flight at once, by priority.
//
// Rule 1. Each block is copied through an aligned buffer that is registered with the kernel, so tensors may have any address. The last
//         block of a tensor is padded with zeros to a multiple of kAlign. Direct I/O on aligned tensors was measured to be slower:
//         the kernel pins and maps their pages each time, and a copy that computes the checksum is nearly free.
// Rule 2. A block's checksum is computed before the write and compared after the read. A difference is an error, and the tensor's
//         memory is undefined then.
// Rule 3. A partial transfer is continued where it stopped; a transfer of no bytes is an error.
// Rule 4. The drive never waits for a checksum or a copy: `kPrepared` blocks are ready to be written before a slot in flight is free,
//         and a block that was read is checked while the next read is in flight. `kPrepared` extra buffers allow this.
// Rule 5. One thread of the engine does all of it. The caller keeps memory, checksums and file until `wait` has returned.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/backend.h"

namespace memtune::io {

constexpr std::uint64_t kAlign = 4096;
constexpr std::uint32_t kPrepared = 4;

// Results of a transfer other than 0 and errno.
enum Failure : int { kWrongChecksum = -1, kEndOfFile = -2, kCancelled = -3 };

struct Transfer {
  bool write;
  int fd;
  unsigned char* memory;
  std::uint64_t bytes, offset;  // offset: a multiple of kAlign
  std::uint64_t* sums;          // one per block
  std::int64_t priority;        // smaller is sooner; equal ones in order of their start
};

struct Result {
  int error;            // 0, an errno, or a Failure
  std::uint64_t block;  // the first one that failed
};

struct Counters {
  std::uint64_t read_bytes, written_bytes;  // as moved by the kernel, filling included
};

class Engine {
 public:
  // `which`: "auto", "io_uring" or "threads"; "auto" uses io_uring if it works. Throws std::runtime_error if there is no memory for the
  // buffers, or if "io_uring" is refused.
  Engine(const std::string& which, std::uint32_t depth, std::uint32_t block_bytes, bool checksums);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::uint64_t start(const Transfer& transfer);
  Result wait(std::uint64_t ticket);  // each ticket once
  void close();  // finishes blocks in flight; cancels blocks that were not started and later transfers
  Counters counters();
  std::uint64_t blocks(std::uint64_t bytes) const { return (bytes + block_bytes_ - 1) / block_bytes_; }
  std::string name() const { return backend_->name(); }
  const std::string& refused() const { return refused_; }

 private:
  struct Active {
    Transfer transfer;
    std::uint64_t next = 0, left = 0;  // blocks not started, blocks not done
    Result result{0, 0};
  };
  struct Slot {
    std::uint64_t ticket = 0, block = 0;
    std::uint32_t bytes = 0, moved = 0;  // with filling
  };
  struct Unmap {
    std::size_t bytes;
    void operator()(unsigned char* memory) const;
  };

  using Lock = std::unique_lock<std::mutex>;
  void serve();
  void give_up();
  bool fill(Lock& lock);
  bool prepare_next(Lock& lock);
  bool first_writes() const;
  std::uint32_t take(Lock& lock);
  void prepare(std::uint32_t slot, const Transfer& transfer);
  void launch(std::uint32_t slot, Lock& lock);
  void finish(const Done& done);
  bool arrived(std::uint32_t slot, const Transfer& transfer) const;
  void end_block(std::uint32_t slot, int error);
  unsigned char* buffer(std::uint32_t slot) const { return memory_.get() + std::size_t{slot} * block_bytes_; }
  std::uint32_t net_bytes(const Transfer& transfer, std::uint64_t block) const;

  const std::uint32_t depth_, block_bytes_;  // blocks under way at most; bytes of each
  const bool checksums_;
  std::string refused_;
  std::unique_ptr<unsigned char, Unmap> memory_;
  std::unique_ptr<Backend> backend_;

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::map<std::uint64_t, Active> active_;
  std::map<std::pair<std::int64_t, std::uint64_t>, std::uint64_t> waiting_;  // (priority, ticket) of what has blocks to start
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::deque<std::uint32_t> ready_;  // slots with blocks that are ready to be written
  std::uint32_t under_way_ = 0;
  std::uint64_t next_ticket_ = 1;
  Counters counters_{0, 0};
  bool stop_ = false;
  std::mutex closing_;
  std::thread thread_;
};

}  // namespace memtune::io
