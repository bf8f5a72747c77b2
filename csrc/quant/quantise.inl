// The loops over blocks. Included once per instruction set, by files that are compiled with its flags and name it: MEMTUNE_ISA.
// Everything else is in an anonymous namespace: the linker must never merge code of different instruction sets.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "quant/quantise.h"

namespace memtune::quant {
namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr int64_t kMost = 4096;           // values of a block
constexpr uint32_t kFinite = 0x7F800000;  // bits of the first size that is not
constexpr uint32_t kSmallest = 8u << 23;  // 2^-119
constexpr float kRounder = 12582912.0f;   // 1.5 * 2^23: the sum's low bits are the integer nearest to the other summand

inline float widen(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > kFinite ? (bits >> 16) | 0x40u : rounded);
}

// Halves: the exponent is shifted by a product, which makes subnormal ones normal.
inline float widen_half(uint16_t x) {
  const uint32_t size = static_cast<uint32_t>(x & 0x7FFFu) << 13;
  const uint32_t bits = std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p112f);
  return std::bit_cast<float>((size >= 0x0F800000u ? bits | kFinite : bits) | static_cast<uint32_t>(x & 0x8000u) << 16);
}

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t narrow_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), size = bits & 0x7FFFFFFFu;
  uint32_t half = (size + 0xC8000FFFu + ((size >> 13) & 1u)) >> 13;
  if (size < 0x38800000u) half = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3F000000u;  // below 2^-14
  if (size >= 0x47800000u) half = size > kFinite ? 0x7E00u : 0x7C00u;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

void read(const void* values, Format format, int64_t at, int64_t n, float* __restrict out) {
  if (format == Format::float32) {
    std::memcpy(out, static_cast<const float*>(values) + at, n * sizeof(float));
  } else {
    const uint16_t* __restrict from = static_cast<const uint16_t*>(values) + at;
    if (format == Format::bfloat16) {
      for (int64_t i = 0; i < n; ++i) out[i] = widen(from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) out[i] = widen_half(from[i]);
    }
  }
}

void write(void* values, Format format, int64_t at, int64_t n, const float* __restrict from) {
  if (format == Format::float32) {
    std::memcpy(static_cast<float*>(values) + at, from, n * sizeof(float));
  } else {
    uint16_t* __restrict to = static_cast<uint16_t*>(values) + at;
    if (format == Format::bfloat16) {
      for (int64_t i = 0; i < n; ++i) to[i] = narrow(from[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = narrow_half(from[i]);
    }
  }
}

// (scale, levels/largest) of a block; sizes of floats are ordered as their bits are, and integers' maximum vectorises.
struct Scale {
  float scale, inverse;
};

Scale scale_of(const float* __restrict x, int64_t n, float levels) {
  uint32_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t each = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
    size = each > size ? each : size;
  }
  if (size >= kFinite) return {std::bit_cast<float>(0x7FC00000u), 0.0f};
  if (size < kSmallest) return {0.0f, 0.0f};
  const float largest = std::bit_cast<float>(size);
  return {largest / levels, levels / largest};
}

// Codes of values that may not be finite when `inverse` is 0: those are 0 then.
inline uint32_t code_of(float x, float inverse) { return std::bit_cast<uint32_t>(x * inverse + kRounder); }

void encode(const float* __restrict x, int64_t n, float inverse, int bits, uint8_t* __restrict out) {
  if (inverse == 0.0f) {
    std::memset(out, 0, bits == 8 ? n : (n + 1) / 2);
  } else if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(code_of(x[i], inverse));
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      out[i] = static_cast<uint8_t>((code_of(x[2 * i], inverse) & 15u) | ((code_of(x[2 * i + 1], inverse) & 15u) << 4));
    }
    if (n % 2) out[n / 2] = static_cast<uint8_t>(code_of(x[n - 1], inverse) & 15u);
  }
}

void decode(const uint8_t* __restrict codes, int64_t n, float scale, int bits, float* __restrict out) {
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale;
  } else {
    for (int64_t i = 0; i < n / 2; ++i) {
      out[2 * i] = static_cast<float>((static_cast<int>(codes[i] & 15u) ^ 8) - 8) * scale;
      out[2 * i + 1] = static_cast<float>((static_cast<int>(codes[i] >> 4) ^ 8) - 8) * scale;
    }
    if (n % 2) out[n - 1] = static_cast<float>((static_cast<int>(codes[n / 2] & 15u) ^ 8) - 8) * scale;
  }
}

// One block of a row: where its values, its scale or kept values, and its integers are.
struct Place {
  int64_t value, count, scale, kept, code;
};

// Calls `work(row, place)` for blocks [first, last).
template <typename Work>
void each_block(const Row& row, int64_t first, int64_t last, Work work) {
  const int64_t per_row = blocks_in(row);
  for (int64_t r = first / per_row; r * per_row < last; ++r) {
    int64_t number = r * per_row;
    for (const Stretch& s : row.stretches) {
      const int64_t blocks = (s.count + row.block - 1) / row.block;
      const int64_t begin = first > number ? first - number : 0;
      const int64_t stop = last - number < blocks ? last - number : blocks;
      for (int64_t b = begin; b < stop; ++b) {
        const int64_t skipped = b * row.block, left = s.count - skipped;
        work(r, Place{s.begin + skipped, left < row.block ? left : row.block, s.scale < 0 ? -1 : s.scale + b,
                      s.kept < 0 ? -1 : s.kept + skipped, s.scale < 0 ? -1 : s.code + skipped * row.bits / 8});
      }
      number += blocks;
    }
  }
}

void pack_blocks(const Row& row, const Packing& what, int64_t first, int64_t last) {
  const float levels = row.bits == 8 ? 127.0f : 7.0f;
  const int64_t local = what.rows / what.nodes;
  alignas(64) float x[kMost], back[kMost];
  each_block(row, first, last, [&](int64_t r, const Place& p) {
    const int64_t source = (r % what.nodes) * local + r / what.nodes;
    const int64_t at = source * row.numel + p.value;
    uint8_t* out = what.packed + r * row.n_bytes;
    read(what.values, what.format, at, p.count, x);
    if (p.scale < 0) {
      std::memcpy(out + row.kept_at + 4 * p.kept, x, p.count * sizeof(float));
      return;
    }
    if (what.error != nullptr) {
      const float* __restrict error = what.error + at;
      for (int64_t i = 0; i < p.count; ++i) x[i] += error[i];
    }
    const Scale found = scale_of(x, p.count, levels);
    std::memcpy(out + 4 * p.scale, &found.scale, sizeof(float));
    encode(x, p.count, found.inverse, row.bits, out + row.codes_at + p.code);
    if (what.error != nullptr) {
      decode(out + row.codes_at + p.code, p.count, found.scale, row.bits, back);
      float* __restrict error = what.error + at;
      for (int64_t i = 0; i < p.count; ++i) error[i] = found.scale == found.scale ? x[i] - back[i] : 0.0f;  // NaN is not fed back
    }
  });
}

void unpack_blocks(const Row& row, const Unpacking& what, int64_t first, int64_t last) {
  alignas(64) float sum[kMost], x[kMost];
  each_block(row, first, last, [&](int64_t r, const Place& p) {
    for (int64_t i = 0; i < p.count; ++i) sum[i] = 0.0f;
    for (int64_t s = 0; s < what.sources; ++s) {
      const uint8_t* in = what.packed + (s * what.rows + r) * row.n_bytes;
      if (p.scale < 0) {
        std::memcpy(x, in + row.kept_at + 4 * p.kept, p.count * sizeof(float));
      } else {
        float scale;
        std::memcpy(&scale, in + 4 * p.scale, sizeof(float));
        decode(in + row.codes_at + p.code, p.count, scale, row.bits, x);
      }
      for (int64_t i = 0; i < p.count; ++i) sum[i] += x[i];
    }
    for (int64_t i = 0; i < p.count; ++i) sum[i] *= what.factor;
    write(what.values, what.format, r * row.numel + p.value, p.count, sum);
  });
}

#include "quant/groups.inl"

}  // namespace

extern const Form MEMTUNE_ISA;
const Form MEMTUNE_ISA{pack_blocks, unpack_blocks, compress_groups, decompress_groups};

}  // namespace memtune::quant
