// The functions of CUDA's driver that memtune's allocator calls (csrc/vmm/cuda_driver.cpp), for simulated devices: it finds them because
// the library is named libcuda.so.1 and loaded before.
//
// Errors of queued kernels, and races, are raised by the next use of a device: no exception passes through these functions.
#include <exception>
#include <vector>

#include "simulated_device/devices.h"

namespace memtune::sim {
namespace {

constexpr int kInvalid = 1, kOutOfMemory = 2, kNoDevice = 101, kNoContext = 201, kNotReady = 600, kFailed = 719;

thread_local std::vector<int> contexts;  // devices, the current one last

Devices& devices() { return Devices::get(); }

void* context_of(int device) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(device) + 1); }

// Runs `call` in the current context, with its device.
template <typename Call>
int in_context(Call call) {
  if (contexts.empty()) return kNoContext;
  try {
    return call(contexts.back());
  } catch (const std::exception& error) {
    devices().raise_later(error.what());
    return kFailed;
  }
}

int timeline_of(void* stream, int device) { return stream == nullptr ? Devices::timeline(device, 0) : Devices::timeline_of(stream); }

}  // namespace
}  // namespace memtune::sim

using namespace memtune::sim;

#define DRIVER extern "C" __attribute__((visibility("default"))) int

DRIVER cuInit(unsigned) { return 0; }

DRIVER cuDeviceGet(int* device, int number) {
  *device = number;
  return number >= 0 && number < devices().count() ? 0 : kNoDevice;
}

DRIVER cuDeviceGetAttribute(int* value, int, int) { return *value = 1, 0; }

DRIVER cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = static_cast<std::size_t>(devices().settings().capacity_bytes);
  return 0;
}

DRIVER cuDevicePrimaryCtxRetain(void** context, int device) { return *context = context_of(device), 0; }

DRIVER cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<std::uintptr_t>(context) - 1));
  return 0;
}

DRIVER cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) return kNoContext;
  *context = context_of(contexts.back());
  contexts.pop_back();
  return 0;
}

DRIVER cuCtxSynchronize() {
  return in_context([](int device) { return devices().host_waits_device(device), 0; });
}

DRIVER cuMemGetAllocationGranularity(std::size_t* bytes, const void*, int) { return *bytes = kChunkBytes, 0; }

DRIVER cuMemAddressReserve(unsigned long long* address, std::size_t bytes, std::size_t, unsigned long long, unsigned long long) {
  return in_context([&](int device) { return (*address = devices().reserve(device, bytes)) == 0 ? kOutOfMemory : 0; });
}

DRIVER cuMemAddressFree(unsigned long long, std::size_t) { return 0; }  // each address is handed out once

DRIVER cuMemCreate(unsigned long long* handle, std::size_t bytes, const void*, unsigned long long) {
  if (bytes != kChunkBytes) return kInvalid;
  return in_context([&](int device) { return (*handle = devices().create(device)) == 0 ? kOutOfMemory : 0; });
}

DRIVER cuMemRelease(unsigned long long handle) {
  return in_context([&](int device) { return devices().release(device, handle), 0; });
}

DRIVER cuMemMap(unsigned long long address, std::size_t, std::size_t, unsigned long long handle, unsigned long long) {
  return in_context([&](int) { return devices().map(address, handle) ? 0 : kInvalid; });
}

DRIVER cuMemSetAccess(unsigned long long, std::size_t, const void*, std::size_t) { return 0; }

DRIVER cuMemUnmap(unsigned long long address, std::size_t bytes) {
  return in_context([&](int) { return devices().unmap(address, bytes) ? 0 : kInvalid; });
}

DRIVER cuStreamIsCapturing(void*, int* status) { return *status = 0, 0; }

DRIVER cuEventCreate(void** event, unsigned) { return *event = new Event, 0; }

DRIVER cuEventRecord(void* event, void* stream) {
  return in_context([&](int device) { return devices().record(*static_cast<Event*>(event), timeline_of(stream, device)), 0; });
}

DRIVER cuEventQuery(void* event) {
  try {
    return devices().query(*static_cast<Event*>(event)) ? 0 : kNotReady;
  } catch (const std::exception& error) {
    return devices().raise_later(error.what()), kFailed;
  }
}

DRIVER cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), 0; }

DRIVER cuGetErrorString(int error, const char** text) {
  *text = error == kOutOfMemory ? "out of memory" : error == kNoDevice ? "no such device" : error == kNoContext ? "invalid context" : "failed";
  return 0;
}
