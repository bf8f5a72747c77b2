// Whether a layout is one: slow to fool, sharing nothing with what makes layouts.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace memtune::layout {

// Empty, or the first thing that is wrong: two buffers in one place at one time, an offset below 0 or off its alignment, a height
// that no buffer reaches. `period` 0: a line. Sorts moments and keeps the buffers alive at each in order of their offsets.
std::string fault(std::span<const std::int64_t> start, std::span<const std::int64_t> end, std::span<const std::int64_t> size,
                  std::span<const std::int64_t> alignment, std::int64_t period, std::span<const std::int64_t> offset, std::int64_t height);

}  // namespace memtune::layout
