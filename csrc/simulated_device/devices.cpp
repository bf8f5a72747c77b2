#include "simulated_device/devices.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <cstdlib>
#include <utility>

namespace memtune::sim {
namespace {

constexpr int kFill = 0xFF;
constexpr std::int64_t kRoundedBytes = 512;  // to which allocators round

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t block_bytes(std::int64_t bytes) { return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes))); }

// An access of the host to device memory ends the process, as on a device; this says why.
char* fault_begin = nullptr;
char* fault_end = nullptr;
struct sigaction fault_before;

void on_fault(int signal, siginfo_t* info, void* context) {
  char* at = static_cast<char*>(info->si_addr);
  if (at >= fault_begin && at < fault_end) {
    char text[160];
    const int n = std::snprintf(text, sizeof text, "\nsimulated device: the host accessed the memory of sim:%d at %p\n",
                                static_cast<int>((at - fault_begin) / kAddressBytes), info->si_addr);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text, n);
  } else if (fault_before.sa_flags & SA_SIGINFO) {
    return fault_before.sa_sigaction(signal, info, context);
  } else if (fault_before.sa_handler != SIG_DFL && fault_before.sa_handler != SIG_IGN) {
    return fault_before.sa_handler(signal);
  }
  ::signal(signal, SIG_DFL);  // the access is tried again, and ends the process
}

void explain_faults(char* begin, char* end) {
  fault_begin = begin;
  fault_end = end;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &fault_before);
}

char* map_or_throw(std::size_t bytes, int protection, int flags, int file) {
  void* data = mmap(nullptr, bytes, protection, flags | MAP_NORESERVE, file, 0);
  if (data == MAP_FAILED) throw std::runtime_error("simulated device: no address range of " + std::to_string(bytes) + " bytes");
  return static_cast<char*>(data);
}

}  // namespace

Devices& Devices::get() {
  static Devices* devices = new Devices;  // outlives all tensors
  return *devices;
}

void Devices::configure(const Settings& settings) {
  const std::lock_guard lock(mutex_);
  if (started_) {
    const bool same = settings.devices == settings_.devices && settings.capacity_bytes == settings_.capacity_bytes;
    if (!same) throw std::logic_error("simulated device: the number of devices and their capacity are fixed at the first use");
  }
  const OtherAllocator other = started_ ? settings_.other : settings.other;
  settings_ = settings;
  settings_.other = other;
  random_.seed(settings.seed);
}

void Devices::touch() {
  if (touched_) return;
  touched_ = true;
  pthread_atfork(nullptr, nullptr, [] { get().forked_ = true; });
}

void Devices::lose(std::function<void()> raise) { lost_ = std::move(raise); }

void Devices::start() {
  if (forked_) throw std::runtime_error("Cannot re-initialize the simulated device in a forked process");
  if (lost_) lost_();
  if (started_) return;
  started_ = true;
  touch();
  const std::size_t bytes = static_cast<std::size_t>(kAddressBytes) * settings_.devices;
  const int file = memfd_create("memtune-simulated-device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("simulated device: memfd_create failed");
  const std::size_t all = bytes + (settings_.other.allocate == nullptr ? 0 : kMappedBytes);
  guarded_ = map_or_throw(all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  open_ = map_or_throw(all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  if (mmap(open_, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, 0) == MAP_FAILED) {
    throw std::runtime_error("simulated device: mmap failed");
  }
  if (settings_.other.allocate == nullptr) {
    ::close(file);
  } else {
    const auto capacity = static_cast<std::size_t>(settings_.capacity_bytes);
    driver_ = std::make_unique<DriverMemory>(guarded_, open_, file, kAddressBytes, capacity, bytes);
  }
  explain_faults(guarded_, guarded_ + bytes);
  const int timelines = 1 + settings_.devices * kStreams;
  order_ = std::make_unique<Order>(timelines);
  suspects_.resize(timelines);
  questions_.resize(timelines);
  AllocatorConfig config = settings_.allocator;
  config.capacity_bytes = settings_.capacity_bytes;
  for (int i = 0; i < settings_.devices; ++i) devices_.push_back(std::make_unique<Device>(config));
}

std::int64_t Devices::next_stream(int device) {
  const Section section(*this);
  return 1 + devices_[device]->streams++ % (kStreams - 1);
}

const std::string* Devices::name(const std::string& text) {
  const std::lock_guard lock(mutex_);
  return &*names_.insert(text).first;
}

// Races

std::string Devices::place(int timeline) const {
  if (timeline == kHost) return "the host";
  return "stream " + std::to_string((timeline - 1) % kStreams) + " of sim:" + std::to_string((timeline - 1) / kStreams);
}

std::string Devices::describe(const Race& race) const {
  const auto verb = [](const Use& use) { return use.writes ? "writes" : "reads"; };
  return "race: " + *race.later.op + " on " + place(race.later.timeline) + " " + verb(race.later) + " " +
         std::to_string(race.range.end - race.range.begin) + " bytes that " + *race.earlier.op + " on " +
         place(race.earlier.timeline) + " " + verb(race.earlier) + "; no event or wait orders them";
}

void Devices::report(const std::string& text, bool may_raise) {
  races_.push_back(text);
  if (!settings_.raises) return;
  if (may_raise) throw std::runtime_error("simulated device: " + text);
  if (unreported_.empty()) unreported_ = text;
}

void Devices::raise_unreported() {
  if (unreported_.empty()) return;
  const std::string text = std::exchange(unreported_, {});
  throw std::runtime_error("simulated device: " + text);
}

std::vector<std::string> Devices::take_races() {
  const Section section(*this);
  unreported_.clear();
  return std::exchange(races_, {});
}

// Ops

void Devices::begin(int timeline, const std::string* op, const std::vector<Access>& accesses) {
  raise_unreported();
  const Tick tick = order_->issue(timeline);
  std::vector<Race> races;
  for (const Access& access : accesses) {
    if (access.range.begin == access.range.end) continue;
    const std::vector<Range> bytes = behind(access.range);
    if (bytes.empty()) report("race: " + *op + " on " + place(timeline) + " uses memory that is not mapped", true);
    for (const Range& range : bytes) order_->use(range, {timeline, tick, op, access.writes}, races);
  }
  for (const Race& race : races) report(describe(race), true);
}

template <typename Due>
void Devices::run_tasks(Due due) {
  std::deque<Task> chosen, rest;
  for (Task& task : tasks_) (due(task) ? chosen : rest).push_back(std::move(task));
  tasks_ = std::move(rest);
  std::string wrong;
  std::exception_ptr error;  // of a kernel; the ones after it run all the same
  for (const Task& task : chosen) {
    try {
      const std::string found = task.run();
      if (!found.empty()) wrong = "race: " + found + " before " + *task.after[0].op + " on " + place(task.after[0].timeline) + " was over";
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  release_pinned();
  if (error != nullptr) std::rethrow_exception(error);
  if (!wrong.empty()) report(wrong, true);
}

void Devices::run_until(const Clock& clock) {
  run_tasks([&](const Task& task) {
    return std::all_of(task.after.begin(), task.after.end(), [&](const Use& use) { return Order::covers(clock, use); });
  });
}

void Devices::run_all() {
  const Section section(*this);
  run_tasks([](const Task&) { return true; });
}

void Devices::issue(int timeline, const std::string* op, const std::vector<Access>& accesses, Run run, Range pinned) {
  const Section section(*this);
  begin(timeline, op, accesses);
  const Clock& clock = order_->clock(timeline);
  tasks_.push_back({{{timeline, clock[timeline], op, false}}, std::move(run), pinned, clock});
  if (settings_.pace == Pace::kImmediate) {
    run_until(clock);
  } else if (settings_.pace == Pace::kRandom && random_() % 4 == 0) {
    const Clock drawn = tasks_[random_() % tasks_.size()].clock;
    if (!drawn.empty()) run_until(drawn);
  }
  if (tasks_.size() > kQueuedOps) {
    std::size_t first = 0;
    run_tasks([&](const Task&) { return first++ < kQueuedOps / 2; });
  }
}

void Devices::issue_now(int timeline, const std::string* op, const std::vector<Access>& accesses, bool host_waits) {
  const Section section(*this);
  begin(timeline, op, accesses);
  if (host_waits) return host_waits_clock(order_->clock(timeline));
  run_until(order_->clock(timeline));
}

bool Devices::is_queued(Range pinned) {
  const Section section(*this);
  return std::any_of(tasks_.begin(), tasks_.end(), [&](const Task& task) { return pinned.overlaps(task.pinned); });
}

// Order

void Devices::host_waits_clock(const Clock& clock) {
  order_->wait(kHost, clock);
  run_until(order_->clock(kHost));
}

void Devices::record(Event& event, int timeline) {
  const Section section(*this);
  event.clock = order_->next_clock(timeline);
  event.use = {timeline, event.clock[timeline], nullptr, false};
  event.recorded = true;
  event.questions = 0;
  event.at_ms = std::make_shared<double>(now_ms());
  if (Order::covers(order_->clock(kHost), event.use)) return;
  tasks_.push_back({{event.use}, [at_ms = event.at_ms] { return *at_ms = now_ms(), std::string(); }, {0, 0}, {}});
}

void Devices::wait(int timeline, const Event& event) {
  const Section section(*this);
  if (event.recorded) order_->wait(timeline, event.clock);
}

void Devices::wait_timeline(int timeline, int other) {
  const Section section(*this);
  order_->wait(timeline, order_->next_clock(other));
}

void Devices::host_waits(const Event& event) {
  const Section section(*this);
  raise_unreported();
  if (event.recorded) host_waits_clock(event.clock);
}

void Devices::host_waits_stream(int timeline) {
  const Section section(*this);
  raise_unreported();
  host_waits_clock(order_->next_clock(timeline));
}

void Devices::host_waits_device(int device) {
  const Section section(*this);
  raise_unreported();
  for (int stream = 0; stream < kStreams; ++stream) host_waits_clock(order_->next_clock(timeline(device, stream)));
}

// As late as events allow: the first question finds it not yet over, the second one does.
bool Devices::query(Event& event) {
  const Section section(*this);
  if (!event.recorded || Order::covers(order_->clock(kHost), event.use)) return true;
  if (settings_.pace == Pace::kDeferred && event.questions++ == 0) return false;
  if (settings_.pace == Pace::kRandom && random_() % 2 == 0) return false;
  host_waits_clock(event.clock);
  return true;
}

bool Devices::query_stream(int timeline) {
  const Section section(*this);
  const Clock clock = order_->next_clock(timeline);
  if (Order::covers(order_->clock(kHost), {timeline, clock[timeline], nullptr, false})) return true;
  auto& [tick, asked] = questions_[timeline];
  if (tick != clock[timeline]) {
    tick = clock[timeline];
    asked = 0;
  }
  if (settings_.pace == Pace::kDeferred && asked++ == 0) return false;
  if (settings_.pace == Pace::kRandom && random_() % 2 == 0) return false;
  host_waits_clock(clock);
  return true;
}

// Device memory

void* Devices::open(const void* guarded) const {
  return guarded == nullptr ? nullptr : open_ + (static_cast<const char*>(guarded) - guarded_);
}

int Devices::device_of(const void* data) const {
  const char* at = static_cast<const char*>(data);
  if (driver_) {
    if (const int device = driver_->device_of(reinterpret_cast<std::uintptr_t>(data)); device >= 0) return device;
  }
  if (!started_ || at < guarded_ || at >= guarded_ + kAddressBytes * settings_.devices) return -1;
  return static_cast<int>((at - guarded_) / kAddressBytes);
}

std::vector<Use> Devices::uncovered(Range range, const Clock& clock) const {
  std::vector<Use> found;
  for (const Range& each : behind(range)) {
    const std::vector<Use> uses = order_->uncovered(each, clock);
    found.insert(found.end(), uses.begin(), uses.end());
  }
  return found;
}

Block* Devices::allocate(int device, std::int64_t stream, std::int64_t bytes) {
  if (settings_.other.allocate != nullptr) return allocate_from_other(device, stream, bytes);
  const Section section(*this);
  raise_unreported();
  Device& memory = *devices_[device];
  const int line = timeline(device, stream);
  check_suspects(line);
  release_held(memory);
  std::int32_t index = memory.allocator.allocate(bytes, static_cast<std::int32_t>(stream), 0);
  if (index < 0 && !memory.held.empty()) {
    host_waits_device(device);
    release_held(memory);
    index = memory.allocator.allocate(bytes, static_cast<std::int32_t>(stream), 0);
  }
  if (index < 0) {
    ++memory.stats.ooms;
    OutOfMemory error;
    error.requested_bytes = bytes;
    error.capacity_bytes = settings_.capacity_bytes;
    error.allocated_bytes = memory.stats.allocated_bytes[0].now;
    error.reserved_bytes = memory.allocator.reserved_bytes();
    error.device = device;
    throw error;
  }
  const CachingAllocator::Block& found = memory.allocator.block(index);
  const auto begin = reinterpret_cast<std::uintptr_t>(guarded_ + kAddressBytes * device + found.address);
  auto* block = new Block{device, static_cast<int>(stream), index, bytes, found.bytes,
                          {begin, begin + static_cast<std::uintptr_t>(found.bytes)}, {}, found.small};
  if (const std::int64_t end = found.address + found.bytes; end > memory.touched_bytes) {
    std::memset(open_ + kAddressBytes * device + memory.touched_bytes, kFill, static_cast<std::size_t>(end - memory.touched_bytes));
    memory.touched_bytes = end;
  }
  for (const int pool : {0, block->small ? 1 : 2}) {
    memory.stats.allocated_bytes[pool].add(block->bytes);
    memory.stats.requested_bytes[pool].add(bytes);
    memory.stats.allocations[pool].add(1);
  }
  return block;
}

void Devices::free(Block* block) {
  if (forked_ || lost_) return;  // called by destructors, which must not throw
  if (block->index < 0) return free_to_other(block);
  const Section section(*this);
  const Range range = block->range;
  const int line = timeline(block->device, block->stream);
  const Clock clock = order_->next_clock(line);
  HeldBlock held{block, {}};
  for (const int other : block->recorded) {
    const Use last{other, order_->clock(other)[other], nullptr, false};
    if (!Order::covers(clock, last)) held.uses.push_back(last);
  }
  suspect(*block, clock);
  for (const int pool : {0, block->small ? 1 : 2}) {  // as in torch before other streams are done with the block
    devices_[block->device]->stats.allocated_bytes[pool].remove(block->bytes);
    devices_[block->device]->stats.allocations[pool].remove(1);
  }
  if (held.uses.empty()) {
    release(block);
  } else {
    devices_[block->device]->held.push_back(std::move(held));
  }
}

// Notes uses of a block that is freed on other streams, on which it was not recorded.
void Devices::suspect(const Block& block, const Clock& clock) {
  Suspect found{block.range, {}};
  for (const Use& use : uncovered(block.range, clock)) {
    const auto& recorded = block.recorded;
    if (std::find(recorded.begin(), recorded.end(), use.timeline) == recorded.end()) found.uses.push_back(use);
  }
  if (!found.uses.empty()) suspects_[timeline(block.device, block.stream)].push_back(std::move(found));
}

void Devices::record_stream(Block* block, int line) {
  {
    const Section section(*this);
    auto& recorded = block->recorded;
    const bool is_own = line == timeline(block->device, block->stream);
    if (!is_own && std::find(recorded.begin(), recorded.end(), line) == recorded.end()) recorded.push_back(line);
  }
  if (block->index < 0) settings_.other.record_stream(reinterpret_cast<void*>(block->range.begin), handle(line));
}

// The other allocator has a lock of its own, under which it uses the driver: none is held here meanwhile.
Block* Devices::allocate_from_other(int device, std::int64_t stream, std::int64_t bytes) {
  const int line = timeline(device, stream);
  {
    const Section section(*this);
    raise_unreported();
    check_suspects(line);
  }
  void* data = settings_.other.allocate(static_cast<std::size_t>(bytes), device, handle(line));
  const Section section(*this);
  const std::int64_t owned = (bytes + kRoundedBytes - 1) / kRoundedBytes * kRoundedBytes;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  auto* block = new Block{device, static_cast<int>(stream), -1, bytes, owned, {begin, begin + static_cast<std::uintptr_t>(owned)}, {}, false};
  MemoryStats& stats = devices_[device]->stats;
  stats.allocated_bytes[0].add(owned);
  stats.requested_bytes[0].add(bytes);
  stats.allocations[0].add(1);
  return block;
}

void Devices::free_to_other(Block* block) {
  const int line = timeline(block->device, block->stream);
  {
    const Section section(*this);
    suspect(*block, order_->next_clock(line));
    fill(block->range);
    MemoryStats& stats = devices_[block->device]->stats;
    stats.allocated_bytes[0].remove(block->bytes);
    stats.requested_bytes[0].remove(block->requested_bytes);
    stats.allocations[0].remove(1);
  }
  settings_.other.free(reinterpret_cast<void*>(block->range.begin), static_cast<std::size_t>(block->requested_bytes), block->device, handle(line));
  delete block;
}

void Devices::release(Block* block) {
  Device& memory = *devices_[block->device];
  fill(block->range);
  for (const int pool : {0, block->small ? 1 : 2}) {
    memory.stats.requested_bytes[pool].remove(block->requested_bytes);
  }
  memory.allocator.free(block->index, 0, 0);
  delete block;
}

// Marks freed bytes after their last use; the next owner's first use, which is ordered after that one, comes later.
void Devices::fill(Range range) {
  auto run = [this, parts = behind(range)] {
    for (const Range& each : parts) {
      std::memset(open(reinterpret_cast<void*>(each.begin)), kFill, static_cast<std::size_t>(each.end - each.begin));
    }
    return std::string();
  };
  std::vector<Use> uses = uncovered(range, order_->clock(kHost));
  if (uses.empty()) {
    run();
  } else {
    tasks_.push_back({std::move(uses), std::move(run), {0, 0}, {}});
  }
}

// A recorded use is over when the host, or the stream of the block, has waited for it.
void Devices::release_held(Device& device) {
  std::erase_if(device.held, [&](HeldBlock& held) {
    const Clock clock = order_->next_clock(timeline(held.block->device, held.block->stream));
    for (const Use& use : held.uses) {
      if (!Order::covers(clock, use)) return false;
    }
    release(held.block);
    return true;
  });
}

void Devices::check_suspects(int line) {
  if (suspects_[line].empty()) return;
  const Clock clock = order_->next_clock(line);
  const std::vector<Suspect> suspects = std::exchange(suspects_[line], {});
  for (const Suspect& suspect : suspects) {
    for (const Use& use : suspect.uses) {
      if (Order::covers(clock, use)) continue;
      report("race: " + std::to_string(suspect.range.end - suspect.range.begin) + " bytes of " + place(line) +
                 " are freed and handed out again, and " + *use.op + " on " + place(use.timeline) + " may still use them" +
                 "; record_stream or a wait is missing",
             true);
    }
  }
}

void Devices::empty_cache() {
  if (settings_.other.allocate != nullptr) return settings_.other.empty_cache();
  const Section section(*this);
  for (int i = 0; i < settings_.devices; ++i) {
    host_waits_device(i);
    release_held(*devices_[i]);
    devices_[i]->allocator.release_cached();
  }
}

MemoryStats Devices::stats(int device) {
  const Section section(*this);
  Device& memory = *devices_[device];
  const CachingAllocator& allocator = memory.allocator;
  MemoryStats stats = memory.stats;
  if (driver_) return stats;
  stats.reserved_bytes.now = allocator.reserved_bytes();
  stats.reserved_bytes.peak = allocator.peak_reserved_bytes();
  stats.retries = allocator.retries();
  stats.device_allocs = allocator.device_allocs();
  stats.device_frees = allocator.device_frees();
  return stats;
}

void Devices::reset_peaks(int device) {
  const Section section(*this);
  Device& memory = *devices_[device];
  memory.allocator.restart_peak();
  memory.stats.reserved_bytes.peak = memory.stats.reserved_bytes.now;
  for (int pool = 0; pool < 3; ++pool) {
    for (Counter* counter : {&memory.stats.allocated_bytes[pool], &memory.stats.requested_bytes[pool],
                             &memory.stats.allocations[pool]}) {
      counter->peak = counter->now;
    }
  }
}

std::int64_t Devices::free_bytes(int device) {
  return settings_.capacity_bytes - stats(device).reserved_bytes.now;
}

void Devices::limit(int device, std::int64_t bytes) {
  if (settings_.other.allocate != nullptr) {
    return settings_.other.memory_fraction(static_cast<double>(bytes) / static_cast<double>(settings_.capacity_bytes), device);
  }
  const Section section(*this);
  devices_[device]->allocator.allow(bytes);
}

// The driver's memory

std::uintptr_t Devices::reserve(int device, std::size_t bytes) {
  const Section section(*this);
  return driver_->reserve(device, bytes);
}

std::uintptr_t Devices::create(int device) {
  const Section section(*this);
  const std::uintptr_t chunk = driver_->create(device);
  if (chunk == 0) return 0;
  std::memset(open(reinterpret_cast<void*>(chunk)), kFill, kChunkBytes);
  devices_[device]->stats.reserved_bytes.add(kChunkBytes);
  ++devices_[device]->stats.device_allocs;
  return chunk;
}

void Devices::release(int device, std::uintptr_t chunk) {
  const Section section(*this);
  driver_->release(chunk);
  devices_[device]->stats.reserved_bytes.remove(kChunkBytes);
  ++devices_[device]->stats.device_frees;
}

bool Devices::map(std::uintptr_t address, std::uintptr_t chunk) {
  const Section section(*this);
  return driver_->map(address, chunk);
}

// Unlike cudaFree, this does not wait: what ops may still use must not be taken from them.
bool Devices::unmap(std::uintptr_t address, std::size_t bytes) {
  const Section section(*this);
  for (const Use& use : uncovered({address, address + bytes}, order_->clock(kHost))) {
    report("race: memory is unmapped that " + *use.op + " on " + place(use.timeline) + " may still use; the host has not waited for it", false);
  }
  run_tasks([](const Task&) { return true; });
  return driver_->unmap(address, bytes);
}

void Devices::raise_later(const std::string& error) {
  const Section section(*this);
  if (unreported_.empty()) unreported_ = error;
}

// Pinned memory

void* Devices::allocate_pinned(std::int64_t bytes) {
  if (bytes == 0) return nullptr;
  void* data = nullptr;
  if (posix_memalign(&data, 64, static_cast<std::size_t>(bytes)) != 0) throw std::bad_alloc();
  const Section section(*this);
  pinned_.emplace(reinterpret_cast<std::uintptr_t>(data), Pinned{bytes});
  pinned_bytes_.add(block_bytes(bytes));
  return data;
}

// As torch's allocator of pinned memory does: a block is kept until the copies that use it are over.
void Devices::free_pinned(void* data) {
  if (data == nullptr || forked_ || lost_) return;
  const Section section(*this);
  pinned_.at(reinterpret_cast<std::uintptr_t>(data)).freed = true;
  release_pinned();
}

void Devices::release_pinned() {
  std::erase_if(pinned_, [&](const auto& entry) {
    const auto& [begin, block] = entry;
    const Range range{begin, begin + static_cast<std::uintptr_t>(block.bytes)};
    if (!block.freed || is_queued(range)) return false;
    order_->forget(range);
    pinned_bytes_.remove(block_bytes(block.bytes));
    std::free(reinterpret_cast<void*>(begin));
    return true;
  });
}

Counter Devices::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  return pinned_bytes_;
}

void Devices::reset_pinned_peak() {
  const std::lock_guard lock(mutex_);
  pinned_bytes_.peak = pinned_bytes_.now;
}

bool Devices::is_pinned(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  auto block = pinned_.upper_bound(at);
  if (block == pinned_.begin()) return false;
  --block;
  return at < block->first + static_cast<std::uintptr_t>(block->second.bytes);
}

}  // namespace memtune::sim
