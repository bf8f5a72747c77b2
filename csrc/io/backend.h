// Backends that read and write pieces of a file: io_uring, or threads with pread and pwrite if io_uring is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace memtune::io {

// The data of one system call.
struct Piece {
  bool write;
  int fd;
  unsigned char* memory;
  std::uint32_t bytes;
  std::uint64_t offset;
  std::uint32_t slot;  // number of the backend's buffer that `memory` lies in; identifies the piece
};

struct Done {
  std::uint32_t slot;
  std::int64_t result;  // bytes moved, which may be fewer than asked for, or -errno
};

// At most one piece per slot is under way. One thread starts, submits and waits; any thread may wake.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void start(const Piece& piece) = 0;
  virtual void submit() {}  // submits the pieces that were started
  virtual std::vector<Done> wait() = 0;  // returns when pieces are done, or after `wake`, then possibly without any
  virtual void wake() = 0;
  virtual std::string name() const = 0;
};

// Slots of equal size, one after the other, aligned for direct I/O.
struct Buffers {
  unsigned char* memory;
  std::uint32_t slots, slot_bytes;
};

// Null if the kernel or a sandbox refuses io_uring, which a test read finds out; `why` then has the refused call.
std::unique_ptr<Backend> make_ring(const Buffers& buffers, std::string& why);
std::unique_ptr<Backend> make_threads(int threads);

}  // namespace memtune::io
