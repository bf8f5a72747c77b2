// The CPU as a device with a byte count: torch's CPU allocator, counting live and peak bytes per tier, with a budget per tier.
//
// Compiled at first use by memtune/memory/cpu_allocator.py against torch's headers and loaded with ctypes. Rules:
// 1. A block is [64-byte header | data]. DataPtr's context must equal its data (torch asserts that for raw allocations), so
//    size and tier live in front of the data, and 64 keeps torch's alignment.
// 2. A block is given back to the tier that it was taken from, whatever the tier of the thread that frees it.
// 3. Room is reserved before memory is asked for, and returned if that fails: after an error the counts are as before.
// 4. Device blocks may come from another source (memtune's arenas). Each goes back where it came from; a forked child uses malloc
//    alone and gives nothing back to the source, whose memory it shares with its parent.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

namespace {

constexpr int kTiers = 3;
constexpr const char* kTierNames[kTiers] = {"device", "host", "ssd"};
constexpr int64_t kNoBudget = std::numeric_limits<int64_t>::max();

struct alignas(64) Header {
  int64_t bytes;
  int32_t tier;
  bool from_source;
};
static_assert(sizeof(Header) == 64);

// A cache line each: threads that fill different tiers must not slow each other down.
struct alignas(64) Account {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> budget{kNoBudget};
};

Account accounts[kTiers];
thread_local int current_tier = 0;

using Take = void* (*)(int64_t);
using Give = void (*)(void*);
std::atomic<Take> source_take{nullptr};
std::atomic<Give> source_give{nullptr};
std::atomic<int64_t> source_live{0};  // bytes that the source serves, without their headers

void leave_the_source() {  // Rule 4, in a forked child
  source_take = nullptr;
  source_give = [](void*) {};
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// The op name in a frame of `at::_ops::<name>::call|redispatch`, mangled as _ZN2at4_ops<length><name>…; else empty.
std::string op_of_frame(void* address) {
  constexpr const char* kPrefix = "_ZN2at4_ops";
  Dl_info info;
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr || !starts_with(info.dli_sname, kPrefix)) return "";
  const char* digits = info.dli_sname + std::strlen(kPrefix);
  char* name = nullptr;
  const size_t length = std::strtoul(digits, &name, 10);
  return name == digits ? "" : std::string(name, std::min(length, std::strlen(name)));
}

// The operator being run, read off the native stack. Only a failed request pays for this: watching every operator
// (at::RecordFunction) would cost every operator of every step.
std::string running_op() {
  void* frames[128];
  const int n = backtrace(frames, 128);
  std::string allocating, inner;
  for (int i = 0; i < n; ++i) {
    const std::string op = op_of_frame(frames[i]);
    if (op.empty()) continue;
    if (starts_with(op, "empty") || starts_with(op, "new_empty") || starts_with(op, "resize_")) {
      if (allocating.empty()) allocating = op;
    } else if (inner.empty()) {
      inner = op;
    } else if (op != inner) {
      return "aten::" + inner + " (in aten::" + op + ")";
    }
  }
  if (!inner.empty()) return "aten::" + inner;
  return allocating.empty() ? "code outside torch's operators" : "aten::" + allocating;
}

[[noreturn]] void refuse(int tier, int64_t request, int64_t live) {
  std::ostringstream text;
  const int64_t budget = accounts[tier].budget.load();
  text << "memtune: out of memory in " << running_op() << ": it asks for " << request << " bytes, ";
  if (budget == kNoBudget) {
    text << "which this machine does not have (live now:";
  } else {
    text << "but " << live << " of the " << budget << " bytes of " << kTierNames[tier] << " memory are live (live now:";
  }
  for (int i = 0; i < kTiers; ++i) text << (i ? ", " : " ") << kTierNames[i] << " " << accounts[i].live.load();
  text << "; peak " << kTierNames[tier] << " " << accounts[tier].peak.load() << " bytes)";
  c10::profiledCPUMemoryReporter().OutOfMemory(static_cast<size_t>(request));
  TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
  std::abort();  // not reached: the check above always throws
}

void reserve(int tier, int64_t bytes) {
  Account& account = accounts[tier];
  int64_t live = account.live.load(std::memory_order_relaxed);
  do {
    if (bytes > account.budget.load(std::memory_order_relaxed) - live) refuse(tier, bytes, live);
  } while (!account.live.compare_exchange_weak(live, live + bytes, std::memory_order_relaxed));
  int64_t peak = account.peak.load(std::memory_order_relaxed);
  while (peak < live + bytes && !account.peak.compare_exchange_weak(peak, live + bytes, std::memory_order_relaxed)) {
  }
}

void release(void* data) {
  if (data == nullptr) return;
  Header* header = static_cast<Header*>(data) - 1;
  c10::profiledCPUMemoryReporter().Delete(data);
  accounts[header->tier].live.fetch_sub(header->bytes, std::memory_order_relaxed);  // Rule 2
  if (header->from_source) {
    source_live.fetch_sub(header->bytes, std::memory_order_relaxed);
    source_give.load()(header);
  } else {
    c10::free_cpu(header);
  }
}

// Memory for a block with its header, and whether it is the source's. The source may have run out (null).
std::pair<void*, bool> memory_for(int tier, size_t bytes) {
  const Take take = tier == 0 ? source_take.load(std::memory_order_acquire) : nullptr;
  return take == nullptr ? std::pair{c10::alloc_cpu(bytes), false} : std::pair{take(static_cast<int64_t>(bytes)), true};
}

class Ledger final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    const int tier = current_tier;
    const auto request = static_cast<int64_t>(bytes);
    reserve(tier, request);
    Header* header = nullptr;
    bool from_source = false;
    try {
      const auto [memory, is_source] = memory_for(tier, bytes + sizeof(Header));
      if (memory == nullptr) refuse(tier, request, accounts[tier].live.load() - request);
      header = static_cast<Header*>(memory);
      from_source = is_source;
    } catch (...) {
      accounts[tier].live.fetch_sub(request, std::memory_order_relaxed);  // Rule 3
      throw;
    }
    *header = {request, tier, from_source};
    if (from_source) source_live.fetch_add(request, std::memory_order_relaxed);
    void* data = header + 1;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Ledger ledger;

}  // namespace

extern "C" {

void memtune_ledger_install() { c10::SetCPUAllocator(&ledger, 200); }
int64_t memtune_ledger_live(int tier) { return accounts[tier].live.load(); }
int64_t memtune_ledger_peak(int tier) { return accounts[tier].peak.load(); }
int64_t memtune_ledger_source_live() { return source_live.load(); }
void memtune_ledger_reset_peak() {
  for (Account& account : accounts) account.peak.store(account.live.load());
}
void memtune_ledger_set_budget(int tier, int64_t bytes) { accounts[tier].budget.store(bytes < 0 ? kNoBudget : bytes); }

// Device blocks come from `take` from now on and go back through `give`; a null `take`: from malloc again.
void memtune_ledger_set_source(Take take, Give give) {
  static const int at_fork = pthread_atfork(nullptr, nullptr, &leave_the_source);
  (void)at_fork;
  if (give != nullptr) source_give = give;
  source_take.store(take, std::memory_order_release);
}

void memtune_ledger_set_tier(int tier) { current_tier = tier; }

// The tier of a c10::StorageImpl, or -1 when its bytes did not come from this ledger.
int memtune_ledger_tier_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  if (data.get() == nullptr || data.get_deleter() != &release) return -1;
  return (static_cast<const Header*>(data.get_context()) - 1)->tier;
}
}
