// torch's interfaces of a device: guard, hooks, allocators of device and pinned memory, generators. Kernels are in kernels.cpp.
#include "simulated_device/backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <iomanip>
#include <sstream>

namespace memtune::sim {
namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local DeviceIndex present_device = 0;
thread_local std::vector<std::int64_t> present_streams;

Devices& devices() { return Devices::get(); }

Device checked(Device device) {
  const int index = device.has_index() ? device.index() : present_device;
  TORCH_CHECK(index >= 0 && index < devices().count(), "sim:", index, " does not exist: there are ", devices().count(),
              " simulated devices");
  return {kType, static_cast<DeviceIndex>(index)};
}

int timeline_of(const Stream& stream) { return Devices::timeline(stream.device_index(), stream.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, present_device}; }
  void setDevice(Device device) const override { present_device = checked(device).index(); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) present_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(devices().count()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override {
    const Device at = checked(device);
    return Stream(Stream::UNSAFE, at, current_stream(at.index()));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, checked(device)); }
  Stream getNewStream(Device device, int) const override {
    const Device at = checked(device);
    return Stream(Stream::UNSAFE, at, devices().next_stream(at.index()));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    present_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return devices().query_stream(timeline_of(stream)); }
  void synchronizeStream(const Stream& stream) const override { devices().host_waits_stream(timeline_of(stream)); }
  void synchronizeDevice(DeviceIndex device) const override { devices().host_waits_device(checked({kType, device}).index()); }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    devices().record(*static_cast<Event*>(*event), timeline_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) devices().wait(timeline_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || devices().query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) devices().host_waits(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    return *static_cast<Event*>(end)->at_ms - *static_cast<Event*>(begin)->at_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (data.get_context() != nullptr) devices().record_stream(static_cast<Block*>(data.get_context()), timeline_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Device memory

std::string mebibytes(std::int64_t bytes) {
  std::ostringstream text;
  const bool large = bytes >= (std::int64_t{1} << 30);
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (large ? 1 << 30 : 1 << 20) << (large ? " GiB" : " MiB");
  return text.str();
}

struct DeviceMemory final : c10::DeviceAllocator {
  static void free_block(void* block) {
    if (block != nullptr) devices().free(static_cast<Block*>(block));
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const Device at = checked({kType, present_device});
    if (bytes == 0) return {nullptr, nullptr, &free_block, at};
    try {
      Block* block = devices().allocate(at.index(), current_stream(at.index()), static_cast<std::int64_t>(bytes));
      return {reinterpret_cast<void*>(block->range.begin), block, &free_block, at};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", mebibytes(error.requested_bytes), ". sim:",
                       error.device, " has a total capacity of ", mebibytes(error.capacity_bytes), " of which ",
                       mebibytes(error.capacity_bytes - error.reserved_bytes), " is free. Of the allocated memory ",
                       mebibytes(error.allocated_bytes), " is allocated by PyTorch, and ",
                       mebibytes(error.reserved_bytes - error.allocated_bytes), " is reserved by PyTorch but unallocated.");
    }
  }
  // Without a raw deleter: the context of a block is not its address.
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    devices().run_all();
    default_copy_data(devices().open(target), devices().open(source), bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { devices().empty_cache(); }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const MemoryStats from = devices().stats(checked({kType, device}).index());
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto fill = [](c10::CachingAllocator::Stat& stat, const Counter& counter) {
      stat.current = counter.now;
      stat.peak = counter.peak;
      stat.allocated = counter.added;
      stat.freed = counter.removed;
    };
    for (std::size_t pool = 0; pool < 3; ++pool) {
      fill(stats.allocated_bytes[pool], from.allocated_bytes[pool]);
      fill(stats.active_bytes[pool], from.allocated_bytes[pool]);
      fill(stats.requested_bytes[pool], from.requested_bytes[pool]);
      fill(stats.allocation[pool], from.allocations[pool]);
      fill(stats.active[pool], from.allocations[pool]);
    }
    fill(stats.reserved_bytes[0], from.reserved_bytes);
    stats.num_alloc_retries = from.retries;
    stats.num_ooms = from.ooms;
    stats.num_device_alloc = from.device_allocs;
    stats.num_device_free = from.device_frees;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { devices().reset_peaks(checked({kType, device}).index()); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(DeviceIndex device) override {
    return {devices().free_bytes(checked({kType, device}).index()), devices().settings().capacity_bytes};
  }
};

struct PinnedMemory final : at::HostAllocator {
  static void free_data(void* data) { devices().free_pinned(data); }

  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = devices().allocate_pinned(static_cast<std::int64_t>(bytes));
    return {data, data, &free_data, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override { default_copy_data(target, source, bytes); }
  bool record_event(void*, void*, Stream) override { return true; }  // copies keep their memory anyway
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

// Generators: those of the CPU, so that the same seed gives the same numbers. They have no Philox offset.

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

  void set_current_seed(std::uint64_t seed) override { cpu.set_current_seed(seed); }
  std::uint64_t current_seed() const override { return cpu.current_seed(); }
  std::uint64_t seed() override { return cpu.seed(); }
  void set_offset(std::uint64_t) override { no_offset(); }
  std::uint64_t get_offset() const override { no_offset(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }

  at::Generator cpu;

 private:
  [[noreturn]] static void no_offset() {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "generators of simulated devices are Mersenne Twisters, as the CPU's, without an offset");
    std::abort();
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < devices().count(); ++i) made->push_back(at::make_generator<Generator>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return (*generators)[checked({kType, device}).index()];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices().count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(devices().count()); }
  void setCurrentDevice(DeviceIndex device) const override { present_device = checked({kType, device}).index(); }
  DeviceIndex getCurrentDevice() const override { return present_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = present_device;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 || device >= devices().count() ? present_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return devices().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kType); }
  Device getDeviceFromPtr(void* data) const override {
    const int device = devices().device_of(data);
    TORCH_CHECK(device >= 0, "no memory of a simulated device is at ", data);
    return {kType, static_cast<DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(checked({kType, device}).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override;
};

void register_backend() {
  static bool done = false;
  if (done) return;
  done = true;
  c10::SetAllocator(kType, device_allocator());
  at::setHostAllocator(kType, new PinnedMemory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace

int current_device() { return present_device; }

std::int64_t current_stream(int device) {
  if (present_streams.empty()) present_streams.resize(devices().count(), 0);
  return present_streams[device];
}

c10::Allocator* device_allocator() {
  static auto* memory = new DeviceMemory;
  return memory;
}

at::Generator cpu_generator(const std::optional<at::Generator>& generator, int device) {
  const at::Generator own = generator.has_value() && generator->defined() ? *generator : default_generator(static_cast<DeviceIndex>(device));
  TORCH_CHECK(own.device().type() == kType, "a generator of ", own.device(), " cannot draw numbers on sim:", device);
  return static_cast<Generator*>(own.unsafeGetGeneratorImpl())->cpu;
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const Device device = storage.device();
  const DeviceIndex before = exchangeDevice(device.index());
  c10::DataPtr grown = device_allocator()->allocate(bytes);
  setCurrentDevice(before);
  const std::size_t kept = std::min(bytes, impl->nbytes());
  if (kept > 0) {
    const auto begin = [](const void* data) { return reinterpret_cast<std::uintptr_t>(data); };
    const std::uintptr_t from = begin(impl->data()), to = begin(grown.get());
    devices().issue(current_timeline(device.index()), devices().name("resize_"), {{{from, from + kept}, false}, {{to, to + kept}, true}},
                    [target = devices().open(grown.get()), source = devices().open(impl->data()), kept] {
                      std::memcpy(target, source, kept);
                      return std::string();
                    });
  }
  impl->set_data_ptr_noswap(std::move(grown));
  impl->set_nbytes(bytes);
}

}  // namespace memtune::sim

// Functions of torch.sim beyond torch.accelerator, torch.Stream and torch.Event (tests/support/simulated_device).
TORCH_LIBRARY(memtune_sim, m) {
  using namespace memtune::sim;
  m.def("start(int devices, int capacity_bytes, str pace, int seed, bool raises, int[] allocator) -> ()",
        [](std::int64_t count, std::int64_t capacity, const std::string& pace, std::int64_t seed, bool raises,
           const std::vector<std::int64_t>& allocator) {
          Settings settings;
          settings.devices = static_cast<int>(count);
          settings.capacity_bytes = capacity;
          settings.pace = pace == "immediate" ? Pace::kImmediate : pace == "random" ? Pace::kRandom : Pace::kDeferred;
          settings.seed = static_cast<std::uint64_t>(seed);
          settings.raises = raises;
          if (!allocator.empty()) {
            OtherAllocator& other = settings.other;
            const auto set = [&](auto& function, std::size_t at) { function = reinterpret_cast<std::decay_t<decltype(function)>>(allocator.at(at)); };
            set(other.allocate, 0);
            set(other.free, 1);
            set(other.record_stream, 2);
            set(other.memory_fraction, 3);
            set(other.empty_cache, 4);
          }
          Devices::get().configure(settings);
          register_backend();
        });
  const auto generator = [](std::int64_t device) { return cpu_generator(std::nullopt, static_cast<int>(device)); };
  m.def("get_rng_state(int device) -> Tensor", [generator](std::int64_t device) { return generator(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [generator](std::int64_t device, const at::Tensor& state) { generator(device).set_state(state); });
  m.def("manual_seed(int device, int seed) -> ()", [generator](std::int64_t device, std::int64_t seed) {
    generator(device).set_current_seed(static_cast<std::uint64_t>(seed));
  });
  m.def("initial_seed(int device) -> int",
        [generator](std::int64_t device) { return static_cast<std::int64_t>(generator(device).current_seed()); });
  m.def("limit(int device, int bytes) -> ()",
        [](std::int64_t device, std::int64_t bytes) { Devices::get().limit(static_cast<int>(device), bytes); });
  m.def("pinned_bytes() -> (int current, int peak)", [] {
    const Counter counter = Devices::get().pinned_bytes();
    return std::tuple(counter.now, counter.peak);
  });
  m.def("reset_pinned_peak() -> ()", [] { Devices::get().reset_pinned_peak(); });
  m.def("take_races() -> str[]", [] { return Devices::get().take_races(); });
  m.def("touch() -> ()", [] { Devices::get().touch(); });
  m.def("is_forked() -> bool", [] { return Devices::get().is_forked(); });
  m.def("lose() -> ()", [] {
    Devices::get().lose([] {
      throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "sim error: the device was lost");
    });
  });
}
