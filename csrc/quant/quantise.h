// Quantisation of messages: blocks of 8- or 4-bit integers relative to the largest value of each block, packed row by row.
//
// A row is what one rank sends to another. It has, in this order, the scales of its blocks (float32), the values that are kept as
// float32, and the integers; its length is rounded up to 16 bytes. `Row` has the lengths of stretches that are alternately quantised
// and kept. Each stretch starts a new block. Two 4-bit integers share a byte, the first one in the low bits.
//
// Rules:
// 1. scale = largest/levels, code = round_half_even(value * (levels/largest)), in float32 and uncontracted: every instruction set,
//    torch and the GPU kernels give the same bits. levels is 127 or 7.
// 2. A block whose largest is below 2^-119 is zero (levels/largest must not overflow); one that is not finite is NaN throughout.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace memtune::quant {

enum class Format : std::uint8_t { float32, bfloat16, float16 };

struct Stretch {
  std::int64_t begin, count;       // values of the row
  std::int64_t scale, kept, code;  // first scale, first kept value, first byte of the integers; -1 for none
};

struct Row {
  int bits = 8;
  std::int64_t block = 256;
  std::int64_t numel = 0, n_bytes = 0;
  std::int64_t kept_at = 0, codes_at = 0;  // bytes before the kept values and before the integers
  std::vector<Stretch> stretches;
};

// Throws std::invalid_argument for lengths below zero, bits other than 4 and 8, or a block that is not in [2, 4096] and even.
Row row_of(std::span<const std::int64_t> lengths, int bits, std::int64_t block);

// Values (rows, numel) into packed (rows, n_bytes). With `nodes` > 1 the rows, which are (nodes, rows/nodes) in `values`, are written as
// (rows/nodes, nodes). Where there is an `error` it is float32 and like `values`: quantised is value + error, what is lost becomes the
// new error.
struct Packing {
  const void* values;
  Format format;
  float* error;
  std::int64_t rows, nodes;
  std::uint8_t* packed;
};

// Packed (sources, rows, n_bytes) into values (rows, numel): factor times the sum over the sources, added up in their order.
struct Unpacking {
  const std::uint8_t* packed;
  std::int64_t sources, rows;
  float factor;
  void* values;
  Format format;
};

// A compressed tensor (`groups.inl`): the least value and the step of each group of values (float32 both), then unsigned integers of
// `bits`; its length is rounded up to 16 bytes.
struct Groups {
  int bits = 8;
  std::int64_t group = 256, numel = 0;
  std::int64_t count = 0, codes_at = 0, n_bytes = 0;
};

// Throws std::invalid_argument for bits other than 4 and 8, a group that is not in [2, 4096] and even, or less than no values.
Groups groups_of(std::int64_t numel, int bits, std::int64_t group);

// Values (numel) into packed (n_bytes); rounded at random with numbers drawn from `seed`, or to the nearest.
struct Compressing {
  const void* values;
  Format format;
  std::uint32_t seed;
  bool at_random;
  std::uint8_t* packed;
};

struct Decompressing {
  const std::uint8_t* packed;
  void* values;
  Format format;
};

// The blocks [first, last) of all blocks of all rows (`blocks_in` of each), row by row; the groups [first, last) of a tensor.
struct Form {
  void (*pack)(const Row&, const Packing&, std::int64_t first, std::int64_t last);
  void (*unpack)(const Row&, const Unpacking&, std::int64_t first, std::int64_t last);
  void (*compress)(const Groups&, const Compressing&, std::int64_t first, std::int64_t last);
  void (*decompress)(const Groups&, const Decompressing&, std::int64_t first, std::int64_t last);
};

std::int64_t blocks_in(const Row& row);

// The widest form that this machine runs, or the one named: "base", "avx2", "avx512"; null where the machine or the build lacks it.
const Form* named(const char* isa);
const Form* best();

void pack(const Form& form, const Row& row, const Packing& what, int threads);
void unpack(const Form& form, const Row& row, const Unpacking& what, int threads);
void compress(const Form& form, const Groups& groups, const Compressing& what, int threads);
void decompress(const Form& form, const Groups& groups, const Decompressing& what, int threads);

}  // namespace memtune::quant
