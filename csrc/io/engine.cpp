#include "io/engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "io/checksum.h"

namespace memtune::io {
namespace {

std::uint32_t filled_up(std::uint32_t bytes) { return static_cast<std::uint32_t>((bytes + kAlign - 1) / kAlign * kAlign); }

}  // namespace

void Engine::Unmap::operator()(unsigned char* memory) const { munmap(memory, bytes); }

Engine::Engine(const std::string& which, std::uint32_t depth, std::uint32_t block_bytes, bool checksums)
    : depth_(depth), block_bytes_(filled_up(block_bytes)), checksums_(checksums) {
  const std::size_t bytes = std::size_t{depth_} * block_bytes_;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("there is no memory for the buffers");
  memory_ = {static_cast<unsigned char*>(memory), Unmap{bytes}};
  if (which != "threads") backend_ = make_ring({memory_.get(), depth_, block_bytes_}, refused_);
  if (backend_ == nullptr && which == "io_uring") throw std::runtime_error(refused_);
  if (backend_ == nullptr) backend_ = make_threads(static_cast<int>(std::min(depth_, 8u)));
  slots_.resize(depth_);
  for (std::uint32_t slot = depth_; slot-- > 0;) free_.push_back(slot);
  thread_ = std::thread([this] { serve(); });
}

Engine::~Engine() { close(); }

void Engine::close() {
  const std::lock_guard turn(closing_);
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  backend_->wake();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t Engine::start(const Transfer& transfer) {
  std::uint64_t ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket = next_ticket_++;
    active_[ticket] = {transfer, 0, stop_ ? 0 : blocks(transfer.bytes), {stop_ ? kCancelled : 0, 0}};
    if (transfer.bytes > 0 && !stop_) waiting_[{transfer.priority, ticket}] = ticket;
  }
  work_.notify_one();
  backend_->wake();
  return ticket;
}

Result Engine::wait(std::uint64_t ticket) {
  std::unique_lock lock(mutex_);
  const auto found = active_.find(ticket);
  if (found == active_.end()) throw std::invalid_argument("this transfer was waited for already");
  done_.wait(lock, [&] { return found->second.left == 0; });
  const Result result = found->second.result;
  active_.erase(found);
  return result;
}

Counters Engine::counters() {
  const std::lock_guard lock(mutex_);
  return counters_;
}

std::uint32_t Engine::net_bytes(const Transfer& transfer, std::uint64_t block) const {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(block_bytes_, transfer.bytes - block * block_bytes_));
}

void Engine::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || !waiting_.empty() || free_.size() < depth_; });
    if (stop_) {  // what has not begun never will; what is under way still uses the buffers
      for (const auto& [key, ticket] : waiting_) {
        Active& active = active_.at(ticket);
        active.left -= blocks(active.transfer.bytes) - active.next;
        if (active.result.error == 0) active.result = {kCancelled, active.next};
      }
      waiting_.clear();
      if (free_.size() == depth_) {
        done_.notify_all();
        return;
      }
    }
    while (!stop_ && fill(lock)) {
    }
    if (free_.size() == depth_) continue;
    lock.unlock();
    const std::vector<Done> done = backend_->wait();
    for (const Done& each : done) finish(each);
    lock.lock();
  }
}

// Starts the most urgent block, if there is one and a buffer for it. Copies and checksums without the lock.
bool Engine::fill(std::unique_lock<std::mutex>& lock) {
  if (waiting_.empty() || free_.empty()) return false;
  const auto first = waiting_.begin();
  Active& active = active_.at(first->second);
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  const std::uint32_t bytes = net_bytes(active.transfer, active.next);
  slots_[slot] = {first->second, active.next, filled_up(bytes), 0};
  if (++active.next == blocks(active.transfer.bytes)) waiting_.erase(first);
  const Transfer transfer = active.transfer;
  lock.unlock();
  begin(slot, transfer);
  lock.lock();
  return true;
}

void Engine::begin(std::uint32_t slot, Transfer transfer) {
  const Slot& mine = slots_[slot];
  unsigned char* buffer = memory_.get() + std::size_t{slot} * block_bytes_;
  if (transfer.write) {
    const std::uint32_t bytes = net_bytes(transfer, mine.block);
    std::memcpy(buffer, transfer.memory + mine.block * block_bytes_, bytes);
    std::memset(buffer + bytes, 0, mine.bytes - bytes);
    if (checksums_) transfer.sums[mine.block] = checksum(buffer, mine.bytes);
  }
  backend_->start({transfer.write, transfer.fd, buffer, mine.bytes, transfer.offset + mine.block * block_bytes_, slot});
}

void Engine::finish(const Done& done) {
  Slot& mine = slots_[done.slot];
  Transfer transfer;
  {
    const std::lock_guard lock(mutex_);
    transfer = active_.at(mine.ticket).transfer;
  }
  unsigned char* buffer = memory_.get() + std::size_t{done.slot} * block_bytes_;
  const bool again = done.result == -EINTR || done.result == -EAGAIN;
  if (done.result < 0 && !again) return end_block(done.slot, static_cast<int>(-done.result));
  if (done.result == 0) return end_block(done.slot, transfer.write ? EIO : static_cast<int>(kEndOfFile));
  const std::uint32_t before = mine.moved;
  if (!again) mine.moved += static_cast<std::uint32_t>(done.result);
  if (mine.moved < mine.bytes) {  // Rule 3; from a multiple of kAlign on, as direct I/O wants it
    mine.moved = static_cast<std::uint32_t>(mine.moved / kAlign * kAlign);
    if (mine.moved == before && !again) return end_block(done.slot, transfer.write ? EIO : static_cast<int>(kEndOfFile));
    const std::uint64_t offset = transfer.offset + mine.block * block_bytes_ + mine.moved;
    return backend_->start({transfer.write, transfer.fd, buffer + mine.moved, mine.bytes - mine.moved, offset, done.slot});
  }
  if (!transfer.write) {
    if (checksums_ && checksum(buffer, mine.bytes) != transfer.sums[mine.block]) return end_block(done.slot, kWrongChecksum);
    std::memcpy(transfer.memory + mine.block * block_bytes_, buffer, net_bytes(transfer, mine.block));
  }
  end_block(done.slot, 0);
}

void Engine::end_block(std::uint32_t slot, int error) {
  const std::lock_guard lock(mutex_);
  const Slot& mine = slots_[slot];
  Active& active = active_.at(mine.ticket);
  (active.transfer.write ? counters_.written_bytes : counters_.read_bytes) += error == 0 ? mine.bytes : 0;
  if (error != 0 && (active.result.error == 0 || mine.block < active.result.block)) active.result = {error, mine.block};
  free_.push_back(slot);
  if (--active.left == 0) done_.notify_all();
}

}  // namespace memtune::io
