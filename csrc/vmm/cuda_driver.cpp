#include <dlfcn.h>

#include <map>
#include <mutex>

#include "vmm/cuda_api.h"
#include "vmm/driver.h"

namespace memtune::vmm {

namespace {

constexpr int kVirtualMemorySupported = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED

std::string load(CudaApi& api) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "there is no CUDA driver (libcuda.so.1)";
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = std::string("the CUDA driver has no ") + name;
  };
  find(api.init, "cuInit");
  find(api.device_get, "cuDeviceGet");
  find(api.device_attribute, "cuDeviceGetAttribute");
  find(api.device_total, "cuDeviceTotalMem_v2");
  find(api.retain_context, "cuDevicePrimaryCtxRetain");
  find(api.push_context, "cuCtxPushCurrent_v2");
  find(api.pop_context, "cuCtxPopCurrent_v2");
  find(api.granularity, "cuMemGetAllocationGranularity");
  find(api.address_reserve, "cuMemAddressReserve");
  find(api.address_free, "cuMemAddressFree");
  find(api.create, "cuMemCreate");
  find(api.release, "cuMemRelease");
  find(api.map, "cuMemMap");
  find(api.set_access, "cuMemSetAccess");
  find(api.unmap, "cuMemUnmap");
  find(api.synchronize, "cuCtxSynchronize");
  find(api.error_string, "cuGetErrorString");
  find(api.stream_capturing, "cuStreamIsCapturing");
  find(api.event_create, "cuEventCreate");
  find(api.event_record, "cuEventRecord");
  find(api.event_query, "cuEventQuery");
  find(api.event_destroy, "cuEventDestroy_v2");
  return missing;
}

class CudaDriver final : public Driver {
 public:
  CudaDriver(const CudaApi& api, int device, void* context) : api_(api), context_(context) {
    properties_.location.id = device;
    access_.location.id = device;
  }

  std::optional<Chunk> create() override {
    const Entered here(context_);
    unsigned long long handle = 0;
    if (!holds(api_.create(&handle, kChunkBytes, &properties_, 0), "cuMemCreate")) return std::nullopt;
    return handle;
  }

  void release(Chunk chunk) override {
    const Entered here(context_);
    holds(api_.release(chunk), "cuMemRelease");
  }

  Address reserve(std::int64_t bytes) override {
    const Entered here(context_);
    unsigned long long address = 0;
    const bool made = holds(api_.address_reserve(&address, static_cast<std::size_t>(bytes), kChunkBytes, 0, 0), "cuMemAddressReserve");
    return made ? static_cast<Address>(address) : 0;
  }

  void give_back(Address address, std::int64_t bytes) override {
    const Entered here(context_);
    holds(api_.address_free(address, static_cast<std::size_t>(bytes)), "cuMemAddressFree");
  }

  // Access is granted for the whole range at once: chunk by chunk it would cost more than the mapping.
  bool map(Address address, std::span<const Chunk> chunks) override {
    const Entered here(context_);
    std::size_t mapped = 0;
    for (const Chunk chunk : chunks) {
      if (!holds(api_.map(address + mapped, kChunkBytes, 0, chunk, 0), "cuMemMap")) break;
      mapped += kChunkBytes;
    }
    if (mapped == chunks.size() * kChunkBytes && holds(api_.set_access(address, mapped, &access_, 1), "cuMemSetAccess")) return true;
    if (mapped > 0) api_.unmap(address, mapped);
    return false;
  }

  void unmap(Address address, std::int64_t bytes) override {
    const Entered here(context_);
    holds(api_.unmap(address, static_cast<std::size_t>(bytes)), "cuMemUnmap");
  }

  void synchronize() override {
    const Entered here(context_);
    holds(api_.synchronize(), "cuCtxSynchronize");
  }

  std::string fault() const override { return fault_; }

 private:
  bool holds(int error, const char* call) {
    if (error != 0) fault_ = std::string(call) + ": " + api_.text(error);
    return error == 0;
  }

  const CudaApi& api_;
  void* context_;
  CudaAllocationProperties properties_;
  CudaAccess access_;
  std::string fault_;
};

}  // namespace

const CudaApi& CudaApi::get(std::string& why) {
  static CudaApi api;
  static const std::string missing = load(api);
  why = missing;
  return api;
}

std::string CudaApi::text(int error) const {
  const char* text = nullptr;
  return error_string(error, &text) == 0 && text != nullptr ? text : "error " + std::to_string(error);
}

void* primary_context(int device, std::string& why) {
  static std::mutex lock;
  static std::map<int, void*> contexts;
  const std::lock_guard guard(lock);
  const auto known = contexts.find(device);
  if (known != contexts.end()) return known->second;
  const CudaApi& api = CudaApi::get(why);
  if (!why.empty()) return nullptr;
  int handle = 0;
  void* context = nullptr;
  if (const int error = api.init(0); error != 0) return why = "cuInit: " + api.text(error), nullptr;
  if (const int error = api.device_get(&handle, device); error != 0) return why = "cuDeviceGet: " + api.text(error), nullptr;
  if (const int error = api.retain_context(&context, handle); error != 0) {
    return why = "cuDevicePrimaryCtxRetain: " + api.text(error), nullptr;
  }
  return contexts[device] = context;  // kept until the process ends, as the runtime does
}

Entered::Entered(void* context) {
  std::string why;
  pushed_ = context != nullptr && CudaApi::get(why).push_context(context) == 0;
}

Entered::~Entered() {
  std::string why;
  void* left = nullptr;
  if (pushed_) CudaApi::get(why).pop_context(&left);
}

std::unique_ptr<Driver> cuda_driver(int device, std::string& why) {
  void* const context = primary_context(device, why);
  if (context == nullptr) return nullptr;
  const CudaApi& api = CudaApi::get(why);
  int handle = 0, supported = 0;
  if (const int error = api.device_get(&handle, device); error != 0) return why = "cuDeviceGet: " + api.text(error), nullptr;
  if (const int error = api.device_attribute(&supported, kVirtualMemorySupported, handle); error != 0 || supported == 0) {
    return why = "this GPU's driver cannot map memory (no virtual memory management)", nullptr;
  }
  CudaAllocationProperties properties;
  properties.location.id = handle;
  std::size_t granularity = 0;
  const int error = api.granularity(&granularity, &properties, 0);
  if (error != 0 || granularity == 0 || kChunkBytes % granularity != 0) {
    return why = "this GPU maps memory in pieces of " + std::to_string(granularity) + " bytes", nullptr;
  }
  return std::make_unique<CudaDriver>(api, handle, context);
}

}  // namespace memtune::vmm
