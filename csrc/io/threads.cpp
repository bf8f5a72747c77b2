#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "io/backend.h"

namespace memtune::io {
namespace {

class Threads final : public Backend {
 public:
  explicit Threads(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~Threads() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void start(const Piece& piece) override {
    {
      const std::lock_guard lock(mutex_);
      todo_.push_back(piece);
    }
    work_.notify_one();
  }

  std::vector<Done> wait() override {
    std::unique_lock lock(mutex_);
    news_.wait(lock, [this] { return woken_ || !done_.empty(); });
    woken_ = false;
    return std::exchange(done_, {});
  }

  void wake() override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    news_.notify_one();
  }

  std::string name() const override { return "threads"; }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stop_ || !todo_.empty(); });
      if (stop_) return;
      const Piece piece = todo_.front();
      todo_.pop_front();
      lock.unlock();
      const auto offset = static_cast<off_t>(piece.offset);
      ssize_t moved;
      do {
        moved = piece.write ? pwrite(piece.fd, piece.memory, piece.bytes, offset) : pread(piece.fd, piece.memory, piece.bytes, offset);
      } while (moved < 0 && errno == EINTR);
      const std::int64_t result = moved < 0 ? -errno : moved;
      lock.lock();
      done_.push_back({piece.slot, result});
      news_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, news_;
  std::deque<Piece> todo_;
  std::vector<Done> done_;
  std::vector<std::thread> threads_;
  bool stop_ = false, woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_threads(int threads) { return std::make_unique<Threads>(threads); }

}  // namespace memtune::io
