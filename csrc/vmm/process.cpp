#include "vmm/process.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmm/cuda_api.h"

namespace memtune::vmm {
namespace {

constexpr int kMostDevices = 64;
constexpr unsigned kNoTiming = 2;      // CU_EVENT_DISABLE_TIMING
constexpr int kImplicitCapture = 906;  // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: the legacy stream is asked while another one captures

// A block that another stream still works on: freed when all events have passed.
struct Waiting {
  Address address;
  std::vector<void*> events;
};

struct Device {
  std::mutex lock;
  std::unique_ptr<Allocator> allocator;
  std::vector<std::unique_ptr<Allocator>> retired;             // each as long as something in it is in use
  std::unordered_map<void*, std::int32_t> streams;             // numbers of CUDA streams
  std::unordered_map<Address, std::vector<void*>> used_on;     // other streams that blocks were recorded on
  std::vector<Waiting> waiting;
  std::int64_t limit_bytes = AllocatorOptions{}.limit_bytes;
  void* context = nullptr;  // of a GPU
};

// Never destroyed: tensors outlive whatever the process ends first.
Device& device_of(int device) {
  static auto* const devices = new std::array<Device, kMostDevices + 1>();
  if (device < kCpu || device >= kMostDevices) throw std::out_of_range("no device " + std::to_string(device));
  return (*devices)[static_cast<std::size_t>(device + 1)];
}

struct Defaults {
  std::mutex lock;
  AllocatorOptions options;
};

Defaults& defaults() {
  static auto* const made = new Defaults();
  return *made;
}

AllocatorOptions default_options() {
  const std::lock_guard guard(defaults().lock);
  return defaults().options;
}

const CudaApi& cuda() {
  std::string why;
  return CudaApi::get(why);
}

bool give(Device& device, Address address) {
  if (device.allocator && device.allocator->free(address)) return true;
  for (auto each = device.retired.begin(); each != device.retired.end(); ++each) {
    if (!(*each)->free(address)) continue;
    if ((*each)->is_empty()) device.retired.erase(each);
    return true;
  }
  return false;
}

// Frees blocks that no stream uses any more; with `wait` all of them, after the device has finished.
void finish(Device& device, bool wait) {
  if (device.waiting.empty()) return;
  const CudaApi& api = cuda();
  const Entered here(device.context);
  if (wait) api.synchronize();
  std::erase_if(device.waiting, [&](Waiting& each) {
    std::erase_if(each.events, [&](void* event) { return api.event_query(event) == 0 && api.event_destroy(event) == 0; });
    if (!each.events.empty()) return false;
    give(device, each.address);
    return true;
  });
}

[[noreturn]] void refuse(std::size_t bytes, int number, Device& device) {
  const Statistics found = device.allocator->statistics();
  throw std::runtime_error("CUDA out of memory: memtune's allocator was asked for " + std::to_string(bytes) + " bytes on GPU " +
                           std::to_string(number) + "; it has " + std::to_string(found.reserved_bytes) + " bytes reserved, of which " +
                           std::to_string(found.allocated_bytes) + " are in use");
}

std::string open_locked(int number, Device& device, AllocatorOptions wanted) {
  if (device.allocator) return "";
  std::string why;
  std::unique_ptr<Driver> driver = number == kCpu ? memory_file(why) : cuda_driver(number, why);
  // A file in memory takes any size and ends the process when the machine's memory is used up.
  if (number == kCpu) wanted.limit_bytes = std::min(wanted.limit_bytes, std::int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE));
  wanted.limit_bytes = std::min(wanted.limit_bytes, device.limit_bytes);
  if (!driver) return why;
  if (number != kCpu) device.context = primary_context(number, why);
  device.allocator = std::make_unique<Allocator>(std::move(driver), wanted);
  return "";
}

// Memory cannot be mapped while a CUDA graph is captured, and addresses in a graph must remain valid permanently.
bool is_capturing(void* stream) {
  int capturing = 0;
  const int error = cuda().stream_capturing(stream, &capturing);
  return error == kImplicitCapture || (error == 0 && capturing != 0);
}

// An event after what `stream` has to do now; null where there is none, and the device has finished instead.
void* event_on(void* stream) {
  void* event = nullptr;
  if (cuda().event_create(&event, kNoTiming) == 0) {
    if (cuda().event_record(event, stream) == 0) return event;
    cuda().event_destroy(event);
  }
  cuda().synchronize();
  return nullptr;
}

}  // namespace

std::string open(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  return open_locked(number, device, {});
}

std::string replace(int number, const AllocatorOptions& options) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  if (device.allocator) {
    finish(device, true);
    device.allocator->release_unused();
    if (!device.allocator->is_empty()) device.retired.push_back(std::move(device.allocator));
    device.allocator.reset();
  }
  return open_locked(number, device, options);
}

void set_defaults(const AllocatorOptions& options) {
  const std::lock_guard guard(defaults().lock);
  defaults().options = options;
}

void limit(int number, std::int64_t bytes) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  device.limit_bytes = bytes;
  if (device.allocator) device.allocator->limit(bytes);
}

std::vector<Region> regions(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  return device.allocator ? device.allocator->regions() : std::vector<Region>{};
}

void begin_update(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  if (device.allocator) device.allocator->begin_update();
}

void end_step(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  if (!device.allocator) return;
  finish(device, false);
  device.allocator->end_step();
}

void release_unused(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  if (!device.allocator) return;
  finish(device, true);
  device.allocator->release_unused();
}

void restart_peaks(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  if (device.allocator) device.allocator->restart_peaks();
}

Statistics statistics(int number) {
  Device& device = device_of(number);
  const std::lock_guard guard(device.lock);
  return device.allocator ? device.allocator->statistics() : Statistics{};
}

}  // namespace memtune::vmm

using memtune::vmm::Address;

extern "C" {

void* memtune_arena_take(std::int64_t bytes) {
  auto& device = memtune::vmm::device_of(memtune::vmm::kCpu);
  const std::lock_guard guard(device.lock);
  return reinterpret_cast<void*>(device.allocator->allocate(bytes, 0));
}

void memtune_arena_give(void* data) {
  auto& device = memtune::vmm::device_of(memtune::vmm::kCpu);
  const std::lock_guard guard(device.lock);
  if (memtune::vmm::give(device, reinterpret_cast<Address>(data))) return;
  std::fprintf(stderr, "memtune: a block that this allocator does not have was freed\n");
  std::abort();
}

void* memtune_cuda_alloc(std::size_t bytes, int number, void* stream) {
  namespace vmm = memtune::vmm;
  if (bytes == 0) return nullptr;
  vmm::Device& device = vmm::device_of(number);
  const std::lock_guard guard(device.lock);
  if (!device.allocator) {
    if (const std::string why = vmm::open_locked(number, device, vmm::default_options()); !why.empty()) {
      throw std::runtime_error("memtune's allocator: " + why);
    }
  }
  if (vmm::is_capturing(stream)) {
    throw std::runtime_error("memtune's allocator does not serve the capture of CUDA graphs; use allocator: {kind: native}");
  }
  vmm::finish(device, false);
  const auto known = device.streams.emplace(stream, static_cast<std::int32_t>(device.streams.size())).first;
  const auto size = static_cast<std::int64_t>(bytes);
  Address address = device.allocator->allocate(size, known->second);
  if (address == 0) {
    vmm::finish(device, true);
    address = device.allocator->allocate(size, known->second);
  }
  if (address == 0) vmm::refuse(bytes, number, device);
  return reinterpret_cast<void*>(address);
}

void memtune_cuda_free(void* data, std::size_t, int number, void*) {
  namespace vmm = memtune::vmm;
  if (data == nullptr) return;
  vmm::Device& device = vmm::device_of(number);
  const std::lock_guard guard(device.lock);
  const auto address = reinterpret_cast<Address>(data);
  const auto recorded = device.used_on.find(address);
  if (recorded == device.used_on.end()) {
    if (!vmm::give(device, address)) throw std::runtime_error("memtune's allocator: no block begins here");
    return;
  }
  vmm::Waiting waiting{address, {}};
  const vmm::Entered here(device.context);  // the caller may use another device, or have no context yet
  for (void* const stream : recorded->second) {
    if (void* const event = vmm::event_on(stream)) waiting.events.push_back(event);
  }
  device.used_on.erase(recorded);
  device.allocator->free_later(address);
  device.waiting.push_back(std::move(waiting));
}

void memtune_cuda_record_stream(void* data, void* stream) {
  namespace vmm = memtune::vmm;
  for (int number = 0; number < vmm::kMostDevices; ++number) {
    vmm::Device& device = vmm::device_of(number);
    const std::lock_guard guard(device.lock);
    if (!device.allocator || device.allocator->bytes_at(reinterpret_cast<Address>(data)) < 0) continue;
    const auto own = device.streams.find(stream);  // its own work is in order anyway
    if (own != device.streams.end() && own->second == device.allocator->stream_at(reinterpret_cast<Address>(data))) return;
    auto& streams = device.used_on[reinterpret_cast<Address>(data)];
    for (void* const known : streams) {
      if (known == stream) return;
    }
    streams.push_back(stream);
    return;
  }
}

void memtune_cuda_memory_fraction(double fraction, int number) {
  namespace vmm = memtune::vmm;
  std::string why;
  int handle = 0;
  std::size_t total = 0;
  if (vmm::primary_context(number, why) == nullptr) throw std::runtime_error("memtune's allocator: " + why);
  const bool known = vmm::cuda().device_get(&handle, number) == 0 && vmm::cuda().device_total(&total, handle) == 0;
  if (!known) throw std::runtime_error("memtune's allocator: the driver does not tell the memory of GPU " + std::to_string(number));
  vmm::limit(number, static_cast<std::int64_t>(fraction * static_cast<double>(total)));
}

void memtune_cuda_empty_cache() {
  for (int number = 0; number < memtune::vmm::kMostDevices; ++number) memtune::vmm::release_unused(number);
}
}
