// Memory in large pages: fewer faults when it is first written, fewer walks of the page table when it is streamed.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace memtune {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Wishes for them in the whole large pages within `bytes` at `memory`, so nothing beside it is backed that would not be. False:
// the system has none, or there is no whole one.
inline bool wish_huge_pages(void* memory, std::size_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto from = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t first = (from + kHugePage - 1) / kHugePage * kHugePage, end = (from + bytes) / kHugePage * kHugePage;
  return first < end && madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE) == 0;
#else
  return false;
#endif
}

}  // namespace memtune
