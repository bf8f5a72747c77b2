// io_uring by its system calls alone (io_uring_setup(2), io_uring_enter(2), io_uring_register(2)): there is no library to depend on.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "io/backend.h"

namespace memtune::io {
namespace {

constexpr std::uint64_t kWake = ~std::uint64_t{0};  // user_data of the read of the event counter

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes, std::uint64_t offset) : bytes_(bytes) {
    at_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (at_ == MAP_FAILED) at_ = nullptr;
  }
  Mapping(Mapping&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (at_ != nullptr) munmap(at_, bytes_);
  }
  explicit operator bool() const { return at_ != nullptr; }
  template <typename T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(at_) + offset);
  }

 private:
  void* at_ = nullptr;
  std::size_t bytes_ = 0;
};

unsigned loaded(unsigned* at) { return std::atomic_ref(*at).load(std::memory_order_acquire); }
void stored(unsigned* at, unsigned value) { std::atomic_ref(*at).store(value, std::memory_order_release); }

class Ring final : public Backend {
 public:
  ~Ring() override {
    if (fd_ >= 0) close(fd_);  // before the buffers that the kernel may hold
    if (event_ >= 0) close(event_);
  }

  // Sets up the ring and tests it with one read; returns the failed call, "" for none.
  std::string open(const Buffers& buffers) {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, buffers.slots + 2, &params));
    if (fd_ < 0) return failed("io_uring_setup");
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    sq_ = Mapping(fd_, sq_bytes, IORING_OFF_SQ_RING);
    cq_ = Mapping(fd_, cq_bytes, IORING_OFF_CQ_RING);
    entries_ = Mapping(fd_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    event_ = eventfd(0, EFD_CLOEXEC);
    if (!sq_ || !cq_ || !entries_ || event_ < 0) return failed("mapping the rings");
    params_ = params;
    std::vector<iovec> parts(buffers.slots);
    for (std::uint32_t i = 0; i < buffers.slots; ++i) {
      parts[i] = {buffers.memory + std::size_t{i} * buffers.slot_bytes, buffers.slot_bytes};
    }
    // Refused if the limit on locked memory is small. Without registered buffers the kernel pins pages for each transfer.
    registered_ = syscall(__NR_io_uring_register, fd_, IORING_REGISTER_BUFFERS, parts.data(), buffers.slots) == 0;
    wake();
    listen();
    for (;;) {
      const int moved = enter(1);
      if (moved < 0) return failed("io_uring_enter");
      const auto [woken, done] = reaped();
      if (woken < 0) return errno = static_cast<int>(-woken), failed("a read through io_uring");
      if (woken > 0) break;
    }
    listen();
    return {};
  }

  void start(const Piece& piece) override {
    io_uring_sqe& entry = next();
    entry.opcode = static_cast<std::uint8_t>(registered_ ? (piece.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED)
                                                         : (piece.write ? IORING_OP_WRITE : IORING_OP_READ));
    entry.fd = piece.fd;
    entry.addr = reinterpret_cast<std::uint64_t>(piece.memory);
    entry.len = piece.bytes;
    entry.off = piece.offset;
    entry.buf_index = static_cast<std::uint16_t>(piece.slot);
    entry.user_data = piece.slot;
  }

  void submit() override {
    if (prepared_ > 0) enter(0);  // `wait` submits entries that the kernel does not take now
  }

  std::vector<Done> wait() override {
    if (enter(1) < 0) return {};  // interrupted or busy: the caller retries
    auto [woken, done] = reaped();
    if (woken != 0) listen();
    return done;
  }

  void wake() override {
    const std::uint64_t one = 1;
    while (write(event_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  std::string name() const override { return registered_ ? "io_uring" : "io_uring, buffers not registered"; }

 private:
  static std::string failed(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

  io_uring_sqe& next() {
    const unsigned tail = *sq_.at<unsigned>(params_.sq_off.tail), index = tail & (params_.sq_entries - 1);
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[index];
    std::memset(&entry, 0, sizeof(entry));
    sq_.at<unsigned>(params_.sq_off.array)[index] = index;
    stored(sq_.at<unsigned>(params_.sq_off.tail), tail + 1);
    ++prepared_;
    return entry;
  }

  void listen() {
    io_uring_sqe& entry = next();
    entry.opcode = IORING_OP_READ;
    entry.fd = event_;
    entry.addr = reinterpret_cast<std::uint64_t>(&count_);
    entry.len = sizeof(count_);
    entry.off = ~std::uint64_t{0};
    entry.user_data = kWake;
  }

  int enter(unsigned at_least) {
    const unsigned flags = at_least > 0 ? IORING_ENTER_GETEVENTS : 0;
    const long taken = syscall(__NR_io_uring_enter, fd_, prepared_, at_least, flags, nullptr, 0);
    if (taken >= 0) prepared_ -= static_cast<unsigned>(taken);
    return taken >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : -1;
  }

  // Returns the result of the read of the event counter (0: still waiting), and the completed pieces.
  std::pair<std::int64_t, std::vector<Done>> reaped() {
    std::int64_t woken = 0;
    std::vector<Done> done;
    unsigned head = *cq_.at<unsigned>(params_.cq_off.head);
    const unsigned tail = loaded(cq_.at<unsigned>(params_.cq_off.tail));
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = cq_.at<io_uring_cqe>(params_.cq_off.cqes)[head & (params_.cq_entries - 1)];
      if (entry.user_data == kWake) {
        woken = entry.res;
      } else {
        done.push_back({static_cast<std::uint32_t>(entry.user_data), entry.res});
      }
    }
    stored(cq_.at<unsigned>(params_.cq_off.head), head);
    return {woken, std::move(done)};
  }

  int fd_ = -1, event_ = -1;
  bool registered_ = false;
  unsigned prepared_ = 0;  // entries that the kernel has not taken yet
  std::uint64_t count_ = 0;
  io_uring_params params_{};
  Mapping sq_, cq_, entries_;
};

}  // namespace

std::unique_ptr<Backend> make_ring(const Buffers& buffers, std::string& why) {
  auto ring = std::make_unique<Ring>();
  why = ring->open(buffers);
  return why.empty() ? std::move(ring) : nullptr;
}

}  // namespace memtune::io
