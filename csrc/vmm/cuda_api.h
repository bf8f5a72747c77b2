// The part of CUDA's driver interface that is used here, found in libcuda at run time: nothing is linked, no header is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace memtune::vmm {

// As cuda.h (12.x) has them; all enumerations are ints.
struct CudaLocation {
  int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int id = 0;
};
struct CudaAllocationProperties {
  int type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
  int handle_types = 0;
  CudaLocation location;
  void* metadata = nullptr;
  unsigned char flags[8] = {};
};
struct CudaAccess {
  CudaLocation location;
  int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

struct CudaApi {
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*device_attribute)(int*, int, int) = nullptr;
  int (*device_total)(std::size_t*, int) = nullptr;
  int (*retain_context)(void**, int) = nullptr;
  int (*push_context)(void*) = nullptr;
  int (*pop_context)(void**) = nullptr;
  int (*granularity)(std::size_t*, const CudaAllocationProperties*, int) = nullptr;
  int (*address_reserve)(unsigned long long*, std::size_t, std::size_t, unsigned long long, unsigned long long) = nullptr;
  int (*address_free)(unsigned long long, std::size_t) = nullptr;
  int (*create)(unsigned long long*, std::size_t, const CudaAllocationProperties*, unsigned long long) = nullptr;
  int (*release)(unsigned long long) = nullptr;
  int (*map)(unsigned long long, std::size_t, std::size_t, unsigned long long, unsigned long long) = nullptr;
  int (*set_access)(unsigned long long, std::size_t, const CudaAccess*, std::size_t) = nullptr;
  int (*unmap)(unsigned long long, std::size_t) = nullptr;
  int (*synchronize)() = nullptr;
  int (*error_string)(int, const char**) = nullptr;
  int (*stream_capturing)(void*, int*) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  int (*event_query)(void*) = nullptr;
  int (*event_destroy)(void*) = nullptr;

  // Loaded once per process; `why` says what is missing, empty if nothing is.
  static const CudaApi& get(std::string& why);
  std::string text(int error) const;
};

// The context that CUDA's runtime, and so torch, uses on a device; made at the first call. Null: `why` says why not.
void* primary_context(int device, std::string& why);

// Makes a context the thread's current one: events and mappings are made in it, and a thread that frees may have another or none.
class Entered {
 public:
  explicit Entered(void* context);
  ~Entered();
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace memtune::vmm
