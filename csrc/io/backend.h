// How a piece of a file is read or written: through io_uring, or by threads that call pread and pwrite where io_uring is refused.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace memtune::io {

// What one system call moves.
struct Piece {
  bool write;
  int fd;
  unsigned char* memory;
  std::uint32_t bytes;
  std::uint64_t offset;
  std::uint32_t slot;  // which of the buffers given to the backend `memory` lies in; also the name of the piece
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
  virtual void submit() {}  // what was started is under way, where it is not already
  virtual std::vector<Done> wait() = 0;  // until something is done, or somebody wakes; then possibly nothing
  virtual void wake() = 0;
  virtual std::string name() const = 0;
};

// Slots of equal size, one after the other, aligned for direct I/O.
struct Buffers {
  unsigned char* memory;
  std::uint32_t slots, slot_bytes;
};

// Null where the kernel or a sandbox refuses io_uring, which is found by using it; `why` then says what was refused.
std::unique_ptr<Backend> make_ring(const Buffers& buffers, std::string& why);
std::unique_ptr<Backend> make_threads(int threads);

}  // namespace memtune::io
