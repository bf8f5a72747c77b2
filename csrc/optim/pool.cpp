#include "optim/pool.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace memtune::optim {
namespace {

class Pool {
 public:
  void run(int parts, const std::function<void(int)>& work) {
    const std::lock_guard guard(callers_);
    while (threads_ < parts - 1) {
      // Detached: they wait for work until the process ends, and are not there after a fork.
      const int part = ++threads_;
      std::thread([this, part, seen = round_] { serve(part, seen); }).detach();
    }
    {
      const std::lock_guard lock(mutex_);
      work_ = &work;
      parts_ = parts;
      waiting_for_ = parts - 1;
      ++round_;
    }
    start_.notify_all();
    work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return waiting_for_ == 0; });
  }

 private:
  void serve(int part, std::uint64_t seen) {
    for (;;) {
      const std::function<void(int)>* work;
      {
        std::unique_lock lock(mutex_);
        start_.wait(lock, [&] { return round_ != seen; });
        seen = round_;
        if (part >= parts_) continue;
        work = work_;
      }
      (*work)(part);
      const std::lock_guard lock(mutex_);
      if (--waiting_for_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable start_, done_;
  const std::function<void(int)>* work_ = nullptr;
  std::uint64_t round_ = 0;
  int threads_ = 0, parts_ = 0, waiting_for_ = 0;
};

// Never destroyed, since its threads outlive `main`; a child of fork leaves the parent's behind.
Pool& pool() {
  static std::mutex mutex;
  static Pool* found = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (found == nullptr || owner != getpid()) {
    found = new Pool();
    owner = getpid();
  }
  return *found;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& work) {
  if (parts <= 1) {
    if (parts == 1) work(0);
    return;
  }
  pool().run(parts, work);
}

}  // namespace memtune::optim
