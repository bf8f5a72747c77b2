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

}  // namespace memtune::vmm
