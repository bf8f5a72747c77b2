// The update as plain loops over blocks. Included once per instruction set, by files that are compiled with its flags and name
// it: MEMTUNE_ISA. Everything is in an anonymous namespace: the linker must never merge code of different instruction sets.
//
// Rules:
// 1. The compiler contracts no multiply-add (-ffp-contract=off); where torch's kernels fuse, the source calls `fma`.
// 2. A loop reads and writes floats or narrow numbers, not both at once: it vectorises. `out` may be the gradient's memory since a
//    block's gradient is read before its `out` is written; no other arrays overlap.

#include <bit>
#include <cmath>
#include <cstdint>

#include "optim/update.h"

namespace memtune::optim {
namespace {

using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

inline float widen(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded);
}

// Counter-based random bits by the "lowbias32" mixer (C. Wellons, Prospecting for Hash Functions, 2018).
inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 32 bits for each element of the block at `begin`; both of its moments are rounded with parts of them.
inline void draw(std::uint64_t seed, int64_t begin, uint32_t* __restrict draws) {
  const uint32_t low = mixed(static_cast<uint32_t>(seed)) + static_cast<uint32_t>(begin);
  const uint32_t high = mixed(static_cast<uint32_t>(seed >> 32) + mixed(static_cast<uint32_t>(begin >> 32)) + 1u);
  for (uint32_t i = 0; i < kBlock; ++i) draws[i] = mixed((low + i) ^ high);
}

// -- formats of moments: a block to float and back ------------------------------------------------------------------------------

// Eight bits: values relative to the block's largest, 3 bits of mantissa. Unsigned: 2^-31.75 to 1; signed: 2^-15.75 to 1.
constexpr uint32_t kOne = 127u << 3;  // 1.0f without the mantissa bits that are dropped
constexpr int kDropped = 20;

template <bool Signed>
inline uint8_t coded(float relative, uint32_t draw) {
  constexpr uint32_t most = Signed ? 127 : 255;
  const uint32_t bits = std::bit_cast<uint32_t>(relative);
  const uint32_t size = ((bits & 0x7FFFFFFFu) + (draw & ((1u << kDropped) - 1))) >> kDropped;
  const uint32_t code = size > kOne - most ? size - (kOne - most) : 0;
  const uint32_t capped = code < most ? code : most;
  if constexpr (Signed) return static_cast<uint8_t>(capped | ((bits >> 31) << 7));
  // A second moment that is not zero must not become zero: the step divides by its root.
  return static_cast<uint8_t>(capped > 0 || (bits & 0x7FFFFFFFu) == 0 ? capped : 1);
}

template <bool Signed>
inline float decoded(uint8_t code) {
  constexpr uint32_t most = Signed ? 127 : 255;
  const uint32_t size = Signed ? code & 127u : code;
  const uint32_t bits = size == 0 ? 0 : (size + (kOne - most)) << kDropped;
  return std::bit_cast<float>(Signed ? bits | ((code >> 7) << 31) : bits);
}

template <bool Signed>
void read(Moments moments, const void* stored, const float* scale, int64_t at, int n, float* __restrict out) {
  if (moments == Moments::bfloat16) {
    const uint16_t* __restrict from = static_cast<const uint16_t*>(stored) + at;
    for (int i = 0; i < n; ++i) out[i] = widen(from[i]);
  } else {
    const uint8_t* __restrict from = static_cast<const uint8_t*>(stored) + at;
    const float largest = scale[at / kBlock];
    for (int i = 0; i < n; ++i) out[i] = decoded<Signed>(from[i]) * largest;
  }
}

template <bool Signed>
void write(Moments moments, void* stored, float* scale, int64_t at, int n, const float* __restrict from,
           const uint32_t* __restrict draws) {
  constexpr int shift = Signed ? 0 : 12;
  if (moments == Moments::bfloat16) {
    uint16_t* __restrict to = static_cast<uint16_t*>(stored) + at;
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
      const uint32_t rounded = (bits + ((draws[i] >> shift) & 0xFFFFu)) >> 16;
      to[i] = static_cast<uint16_t>((bits & 0x7F800000u) == 0x7F800000u ? bits >> 16 : rounded);  // infinite stays infinite
    }
    return;
  }
  uint8_t* __restrict to = static_cast<uint8_t*>(stored) + at;
  uint32_t size = 0;  // sizes of floats are ordered as their bits are, and integers' maximum vectorises
  for (int i = 0; i < n; ++i) {
    const uint32_t each = std::bit_cast<uint32_t>(from[i]) & 0x7FFFFFFFu;
    size = each > size ? each : size;
  }
  const float largest = std::bit_cast<float>(size);
  const float inverse = largest > 0 ? 1.0f / largest : 0.0f;
  scale[at / kBlock] = largest;
  for (int i = 0; i < n; ++i) to[i] = coded<Signed>(from[i] * inverse, draws[i] >> shift);
}

// -- rules: one element; m and v are its moments in float. No branches, selections only: they vectorise -------------------------------

template <Rule rule, bool Momentum>
inline float stepped(float p, float g, float& m, float& v, const Numbers& k) {
  g *= k.sign;
  if constexpr (rule == Rule::adamw) {
    p *= k.decay;
    // exp_avg.lerp_(grad, 1 - beta1), then exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    m = std::fma(k.first, g - m, k.from_gradient ? g : m);
    v = std::fma(k.rest * g, g, v * k.second);
    return p + (k.rate * m) / (std::sqrt(v) / k.correction + k.eps);
  } else if constexpr (rule == Rule::sgd) {
    g = std::fma(p, k.decay, g);
    if constexpr (Momentum) {
      m = std::fma(g, k.second, m * k.first);
      g = std::fma(m, k.lookahead, k.from_gradient ? g : 0.0f);
    }
    return std::fma(g, k.rate, p);
  } else if constexpr (rule == Rule::adagrad) {
    g = std::fma(p, k.decay, g);
    v = std::fma(g, g, v);
    return p + (k.rate * g) / (std::sqrt(v) + k.eps);
  } else {
    const float direction = std::fma(g, k.second, m * k.lookahead);
    m = std::fma(g, k.first, m * k.rest);
    const float sign = (direction > 0 ? 1.0f : 0.0f) - (direction < 0 ? 1.0f : 0.0f);
    return std::fma(sign, k.rate, p * k.decay);
  }
}

// `n` elements, all of them floats.
template <Rule rule, bool Momentum>
void floats(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int n, const Numbers& numbers) {
  constexpr bool has_m = rule != Rule::adagrad && Momentum, has_v = rule == Rule::adamw || rule == Rule::adagrad;
  const Numbers k = numbers;
  for (int i = 0; i < n; ++i) {
    float first = has_m ? m[i] : 0.0f, second = has_v ? v[i] : 0.0f;
    p[i] = stepped<rule, Momentum>(p[i], g[i], first, second, k);
    if constexpr (has_m) m[i] = first;
    if constexpr (has_v) v[i] = second;
  }
}

// Block by block: what is narrow is made float in the first-level cache, updated there and made narrow again.
template <Rule rule, bool Momentum>
void blocks(Moments moments, const Tensors& t, const Numbers& numbers, int64_t begin, int64_t end) {
  constexpr bool has_m = rule != Rule::adagrad && Momentum, has_v = rule == Rule::adamw || rule == Rule::adagrad;
  alignas(64) float g[kBlock], m[kBlock], v[kBlock];
  alignas(64) uint32_t draws[kBlock];
  const bool wide = moments == Moments::float32;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int n = static_cast<int>(end - at < kBlock ? end - at : kBlock);
    const float* gradient = t.narrow_gradient ? g : static_cast<const float*>(t.gradient) + at;
    if (t.narrow_gradient) {
      const uint16_t* __restrict from = static_cast<const uint16_t*>(t.gradient) + at;
      for (int i = 0; i < n; ++i) g[i] = widen(from[i]);
    }
    float* const first = wide ? static_cast<float*>(t.first) + at : m;
    float* const second = wide ? static_cast<float*>(t.second) + at : v;
    if (has_m && !wide) read<true>(moments, t.first, t.first_scale, at, n, m);
    if (has_v && !wide) read<false>(moments, t.second, t.second_scale, at, n, v);
    floats<rule, Momentum>(t.weight + at, gradient, first, second, n, numbers);
    if (!wide) draw(numbers.seed, at, draws);
    if (has_m && !wide) write<true>(moments, t.first, t.first_scale, at, n, m, draws);
    if (has_v && !wide) write<false>(moments, t.second, t.second_scale, at, n, v, draws);
    if (t.out != nullptr) {
      uint16_t* __restrict to = t.out + at;
      const float* __restrict from = t.weight + at;
      for (int i = 0; i < n; ++i) to[i] = narrow(from[i]);
    }
  }
}

}  // namespace

void MEMTUNE_ISA(Rule rule, Moments moments, const Tensors& tensors, const Numbers& numbers, std::int64_t begin, std::int64_t end) {
  switch (rule) {
    case Rule::adamw: return blocks<Rule::adamw, true>(moments, tensors, numbers, begin, end);
    case Rule::sgd:
      return (tensors.first != nullptr ? blocks<Rule::sgd, true> : blocks<Rule::sgd, false>)(moments, tensors, numbers, begin, end);
    case Rule::adagrad: return blocks<Rule::adagrad, false>(moments, tensors, numbers, begin, end);
    case Rule::lion: return blocks<Rule::lion, true>(moments, tensors, numbers, begin, end);
  }
}

}  // namespace memtune::optim
