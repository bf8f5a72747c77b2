// XXH3, 64 bits, seed 0, for inputs of more than 240 bytes: the checksum of a block on SSD.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memtune::io {

constexpr std::size_t kShortest = 241;  // shorter inputs have other formulas, which no block on a disk needs

// The hash of `bytes` >= kShortest bytes at `data`, as the published algorithm defines it (xxHash fast digest algorithm, XXH3
// section "large inputs", https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
std::uint64_t checksum(const void* data, std::size_t bytes);

// The same of what is copied from `from` to `to`, which do not overlap: memory is read once.
std::uint64_t checksum_of_copy(void* to, const void* from, std::size_t bytes);

}  // namespace memtune::io
