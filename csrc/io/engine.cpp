#include "io/engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "huge_pages.h"
#include "io/checksum.h"

namespace memtune::io {
namespace {

std::uint32_t filled_up(std::uint32_t bytes) { return static_cast<std::uint32_t>((bytes + kAlign - 1) / kAlign * kAlign); }

}  // namespace

void Engine::Unmap::operator()(unsigned char* memory) const { munmap(memory, bytes); }

Engine::Engine(const std::string& which, std::uint32_t depth, std::uint32_t block_bytes, bool checksums)
    : depth_(depth), block_bytes_(filled_up(block_bytes)), checksums_(checksums) {
  // More buffers than blocks in flight: writes are copied and summed while the drive is busy.
  const std::uint32_t slots = depth_ + kPrepared;
  const std::size_t bytes = std::size_t{slots} * block_bytes_;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("there is no memory for the buffers");
  wish_huge_pages(memory, bytes);  // fewer pieces for the drive to collect
  memory_ = {static_cast<unsigned char*>(memory), Unmap{bytes}};
  if (which != "threads") backend_ = make_ring({memory_.get(), slots, block_bytes_}, refused_);
  if (backend_ == nullptr && which == "io_uring") throw std::runtime_error(refused_);
  if (backend_ == nullptr) backend_ = make_threads(static_cast<int>(std::min(depth_, 8u)));
  slots_.resize(slots);
  for (std::uint32_t slot = slots; slot-- > 0;) free_.push_back(slot);
  thread_ = std::thread([this] { serve(); });
}

Engine::~Engine() { close(); }

void Engine::close() {
  const std::lock_guard guard(closing_);
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  // The thread may wait for work or for the drive; both must end.
  work_.notify_all();
  backend_->wake();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t Engine::start(const Transfer& transfer) {
  std::uint64_t ticket;
  {
    const std::lock_guard lock(mutex_);
    ticket = next_ticket_++;
    // After the end a transfer is over at once, as cancelled: its caller must not wait for ever.
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
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stop_ || !waiting_.empty() || free_.size() < slots_.size(); });
    if (stop_) {
      give_up();
      if (free_.size() == slots_.size()) {
        done_.notify_all();
        return;
      }
    }
    while (fill(lock)) {
    }
    while (prepare_next(lock)) {
      while (fill(lock)) {
      }
    }
    if (under_way_ == 0) continue;
    lock.unlock();
    const std::vector<Done> done = backend_->wait();
    lock.lock();
    under_way_ -= static_cast<std::uint32_t>(done.size());
    for (const Done& each : done) {
      fill(lock);  // Rule 4
      lock.unlock();
      finish(each);
      lock.lock();
    }
  }
}

// Cancels blocks that were not started; blocks in flight still use the buffers.
void Engine::give_up() {
  for (const auto& [key, ticket] : waiting_) {
    Active& active = active_.at(ticket);
    active.left -= blocks(active.transfer.bytes) - active.next;
    if (active.result.error == 0) active.result = {kCancelled, active.next};
  }
  waiting_.clear();
  for (const std::uint32_t slot : ready_) {
    const Slot& mine = slots_[slot];
    Active& active = active_.at(mine.ticket);
    --active.left;
    if (active.result.error == 0 || mine.block < active.result.block) active.result = {kCancelled, mine.block};
    free_.push_back(slot);
  }
  ready_.clear();
}

bool Engine::first_writes() const { return active_.at(waiting_.begin()->second).transfer.write; }

// Starts the most urgent block, if there is one and a free slot.
bool Engine::fill(Lock& lock) {
  if (under_way_ == depth_) return false;
  const bool more = !waiting_.empty() && !free_.empty();
  // A read that has come meanwhile goes before prepared writes: compute waits for
  // reads.
  if (!ready_.empty() && (!more || first_writes())) {
    const std::uint32_t slot = ready_.front();
    ready_.pop_front();
    launch(slot, lock);
    return true;
  }
  if (!more) return false;
  launch(take(lock), lock);
  return true;
}

// Prepares one more block to be written, if there is one and a free buffer.
bool Engine::prepare_next(Lock& lock) {
  if (ready_.size() >= kPrepared || waiting_.empty() || free_.empty() || !first_writes()) return false;
  ready_.push_back(take(lock));
  return true;
}

// Prepares the most urgent block in a buffer. Copies and computes checksums without the lock.
std::uint32_t Engine::take(Lock& lock) {
  const auto first = waiting_.begin();
  Active& active = active_.at(first->second);
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  const std::uint32_t bytes = net_bytes(active.transfer, active.next);
  slots_[slot] = {first->second, active.next, filled_up(bytes), 0};
  if (++active.next == blocks(active.transfer.bytes)) waiting_.erase(first);
  const Transfer transfer = active.transfer;
  lock.unlock();
  // Copying a block takes as long as the drive; others may start transfers meanwhile.
  prepare(slot, transfer);
  lock.lock();
  return slot;
}

void Engine::prepare(std::uint32_t slot, const Transfer& transfer) {
  if (!transfer.write) return;
  const Slot& mine = slots_[slot];
  const unsigned char* theirs = transfer.memory + mine.block * block_bytes_;
  unsigned char* ours = buffer(slot);
  const std::uint32_t bytes = net_bytes(transfer, mine.block);
  if (checksums_ && bytes == mine.bytes) {
    transfer.sums[mine.block] = checksum_of_copy(ours, theirs, bytes);
    return;
  }
  std::memcpy(ours, theirs, bytes);
  std::memset(ours + bytes, 0, mine.bytes - bytes);
  if (checksums_) transfer.sums[mine.block] = checksum(ours, mine.bytes);
}

void Engine::launch(std::uint32_t slot, Lock& lock) {
  const Slot& mine = slots_[slot];
  const Transfer transfer = active_.at(mine.ticket).transfer;
  ++under_way_;
  lock.unlock();
  const std::uint64_t offset = transfer.offset + mine.block * block_bytes_;
  backend_->start({transfer.write, transfer.fd, buffer(slot), mine.bytes, offset, slot});
  backend_->submit();
  lock.lock();
}

void Engine::finish(const Done& done) {
  Slot& mine = slots_[done.slot];
  Transfer transfer;
  {
    const std::lock_guard lock(mutex_);
    transfer = active_.at(mine.ticket).transfer;
  }
  const bool again = done.result == -EINTR || done.result == -EAGAIN;
  if (done.result < 0 && !again) return end_block(done.slot, static_cast<int>(-done.result));
  // A read of nothing is the end of a truncated file, a write of nothing an error without a number.
  if (done.result == 0) return end_block(done.slot, transfer.write ? EIO : static_cast<int>(kEndOfFile));
  const std::uint32_t before = mine.moved;
  if (!again) mine.moved += static_cast<std::uint32_t>(done.result);
  if (mine.moved < mine.bytes) {  // Rule 3; from a multiple of kAlign on, as direct I/O wants it
    mine.moved = static_cast<std::uint32_t>(mine.moved / kAlign * kAlign);
    if (mine.moved == before && !again) return end_block(done.slot, transfer.write ? EIO : static_cast<int>(kEndOfFile));
    const std::uint64_t offset = transfer.offset + mine.block * block_bytes_ + mine.moved;
    {
      const std::lock_guard lock(mutex_);
      ++under_way_;
    }
    return backend_->start({transfer.write, transfer.fd, buffer(done.slot) + mine.moved, mine.bytes - mine.moved, offset, done.slot});
  }
  end_block(done.slot, transfer.write || arrived(done.slot, transfer) ? 0 : static_cast<int>(kWrongChecksum));
}

// Copies a block that was read to the caller's memory; returns whether its checksum is right.
bool Engine::arrived(std::uint32_t slot, const Transfer& transfer) const {
  const Slot& mine = slots_[slot];
  const std::uint32_t bytes = net_bytes(transfer, mine.block);
  unsigned char* theirs = transfer.memory + mine.block * block_bytes_;
  if (checksums_ && bytes == mine.bytes) return checksum_of_copy(theirs, buffer(slot), bytes) == transfer.sums[mine.block];
  if (checksums_ && checksum(buffer(slot), mine.bytes) != transfer.sums[mine.block]) return false;
  std::memcpy(theirs, buffer(slot), bytes);
  return true;
}

void Engine::end_block(std::uint32_t slot, int error) {
  const std::lock_guard lock(mutex_);
  const Slot& mine = slots_[slot];
  Active& active = active_.at(mine.ticket);
  (active.transfer.write ? counters_.written_bytes : counters_.read_bytes) += error == 0 ? mine.bytes : 0;
  // The first block that failed, in file order, whatever the order of
  // completions.
  if (error != 0 && (active.result.error == 0 || mine.block < active.result.block)) active.result = {error, mine.block};
  free_.push_back(slot);
  if (--active.left == 0) done_.notify_all();
}

}  // namespace memtune::io
