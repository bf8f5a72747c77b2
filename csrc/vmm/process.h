// The allocators of this process: one for the CPU, which torch reaches through memtune's shim, and one for each GPU, which torch reaches
// as a pluggable allocator through the C symbols below. Each has a lock of its own and lives as long as the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vmm/allocator.h"

namespace memtune::vmm {

inline constexpr int kCpu = -1;

// Creates the allocator of a device (kCpu or a GPU's number) if there is none; returns "" or the reason why it cannot.
std::string open(int device);
// Replaces it by one with these options. The old one serves no more requests and ends when its blocks have been freed.
std::string replace(int device, const AllocatorOptions& options);
// Options for GPUs whose allocator torch's first request there makes.
void set_defaults(const AllocatorOptions& options);
void begin_update(int device);
void end_step(int device);
void release_unused(int device);
void restart_peaks(int device);
// A limit on memory from the driver, also of an allocator that is not there yet.
void limit(int device, std::int64_t bytes);
Statistics statistics(int device);
std::vector<Region> regions(int device);

}  // namespace memtune::vmm

extern "C" {
// Of the CPU's allocator, which has been made; null where memory has run out.
__attribute__((visibility("default"))) void* memtune_arena_take(std::int64_t bytes);
__attribute__((visibility("default"))) void memtune_arena_give(void* data);

// Functions for torch.cuda.memory.CUDAPluggableAllocator; errors are std::runtime_error, which torch passes to Python.
__attribute__((visibility("default"))) void* memtune_cuda_alloc(std::size_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void memtune_cuda_free(void* data, std::size_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void memtune_cuda_record_stream(void* data, void* stream);
// torch calls these for set_per_process_memory_fraction and empty_cache.
__attribute__((visibility("default"))) void memtune_cuda_memory_fraction(double fraction, int device);
__attribute__((visibility("default"))) void memtune_cuda_empty_cache();
}
