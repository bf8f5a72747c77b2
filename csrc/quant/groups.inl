// Compressed activations: each group of values as unsigned integers between its least and its largest value (ActNN, arXiv:2104.14129,
// section 3). Included by quantise.inl, inside its anonymous namespace.
//
// Rules, in float32 and uncontracted, so that every instruction set, torch and the GPU kernel give the same bits:
// 1. step = largest/levels - least/levels, t = (value - least) * (1/step), code = floor(t + u); levels is 255 or 15. Rounding to the
//    nearest has u = 0.5. At random u is 24 bits of a hash of seed, index and t, so that the mean over seeds is the value.
// 2. A step below 2^-119 is zero (1/step must not overflow), and all values of the group are the least one.
// 3. A value that is not finite, or at least 2^126, is kept as NaN or infinity. Such groups have the sign bit set in their step, and
//    the three largest codes represent -infinity, infinity and NaN.

constexpr uint32_t kLarge = 253u << 23;  // bits of 2^126: above it the range of a group may overflow

struct Range {
  float least, step, inverse;
  int top;  // largest code of a finite value
};

// Floats are ordered as these integers are, whose extremes vectorise.
inline std::int32_t order_of(float x) {
  const std::int32_t bits = std::bit_cast<std::int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

inline float of_order(std::int32_t key) { return std::bit_cast<float>(key ^ ((key >> 31) & 0x7FFFFFFF)); }

inline uint32_t size_of(float x) { return std::bit_cast<uint32_t>(x) & 0x7FFFFFFFu; }

Range range_of(const float* __restrict x, int64_t n, int levels) {
  std::int32_t least = INT32_MAX, most = INT32_MIN;
  uint32_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    const std::int32_t key = order_of(x[i]);
    least = key < least ? key : least;
    most = key > most ? key : most;
    size = size_of(x[i]) > size ? size_of(x[i]) : size;
  }
  const bool finite = size < kLarge;
  if (!finite) {
    least = INT32_MAX, most = INT32_MIN;
    for (int64_t i = 0; i < n; ++i) {
      if (size_of(x[i]) >= kLarge) continue;
      least = order_of(x[i]) < least ? order_of(x[i]) : least;
      most = order_of(x[i]) > most ? order_of(x[i]) : most;
    }
    if (least > most) least = most = 0;
  }
  const int top = finite ? levels : levels - 3;
  const float low = of_order(least) + 0.0f, high = of_order(most);  // the sum makes a zero positive
  float step = high / static_cast<float>(top) - low / static_cast<float>(top);
  if (step < 0x1p-119f) step = 0.0f;
  return {low, finite ? step : -step, step > 0.0f ? 1.0f / step : 0.0f, top};
}

// The finalizer of MurmurHash3.
inline uint32_t mixed(uint32_t h) {
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

void codes_of(const float* __restrict x, int64_t n, const Range& range, const Compressing& what, uint32_t begin, uint8_t* __restrict out) {
  const float top = static_cast<float>(range.top);
  for (int64_t i = 0; i < n; ++i) {
    const float at = (x[i] - range.least) * range.inverse;
    const float t = at < top ? at : top;
    const uint32_t hash = mixed(std::bit_cast<uint32_t>(t) ^ (what.seed + (begin + static_cast<uint32_t>(i)) * 0x9E3779B9u));
    const float u = what.at_random ? static_cast<float>(static_cast<std::int32_t>(hash >> 8)) * 0x1p-24f : 0.5f;
    const int code = static_cast<int>(t + u);
    out[i] = static_cast<uint8_t>(code < range.top ? code : range.top);
  }
  if (!std::signbit(range.step)) return;
  for (int64_t i = 0; i < n; ++i) {
    if (size_of(x[i]) >= kLarge) out[i] = static_cast<uint8_t>(range.top + (x[i] != x[i] ? 3 : x[i] > 0 ? 2 : 1));
  }
}

void compress_groups(const Groups& groups, const Compressing& what, int64_t first, int64_t last) {
  alignas(64) float x[kMost];
  alignas(64) uint8_t codes[kMost];
  for (int64_t i = first; i < last; ++i) {
    const int64_t begin = i * groups.group, n = std::min(groups.group, groups.numel - begin);
    read(what.values, what.format, begin, n, x);
    const Range range = range_of(x, n, groups.bits == 8 ? 255 : 15);
    std::memcpy(what.packed + 8 * i, &range.least, sizeof(float));
    std::memcpy(what.packed + 8 * i + 4, &range.step, sizeof(float));
    uint8_t* out = what.packed + groups.codes_at + (groups.bits == 8 ? begin : begin / 2);
    codes_of(x, n, range, what, static_cast<uint32_t>(begin), groups.bits == 8 ? out : codes);
    if (groups.bits == 8) continue;
    if (n % 2) codes[n] = 0;
    for (int64_t pair = 0; pair < (n + 1) / 2; ++pair) {
      out[pair] = static_cast<uint8_t>(codes[2 * pair] | codes[2 * pair + 1] << 4);
    }
  }
}

void decompress_groups(const Groups& groups, const Decompressing& what, int64_t first, int64_t last) {
  alignas(64) float x[kMost];
  alignas(64) uint8_t codes[kMost];
  const int top = (groups.bits == 8 ? 255 : 15) - 3;
  const float special[] = {-std::bit_cast<float>(kFinite), std::bit_cast<float>(kFinite), std::bit_cast<float>(0x7FC00000u)};
  for (int64_t i = first; i < last; ++i) {
    const int64_t begin = i * groups.group, n = std::min(groups.group, groups.numel - begin);
    float least, step;
    std::memcpy(&least, what.packed + 8 * i, sizeof(float));
    std::memcpy(&step, what.packed + 8 * i + 4, sizeof(float));
    const uint8_t* in = what.packed + groups.codes_at + (groups.bits == 8 ? begin : begin / 2);
    if (groups.bits == 4) {
      for (int64_t pair = 0; pair < (n + 1) / 2; ++pair) {
        codes[2 * pair] = in[pair] & 15u;
        codes[2 * pair + 1] = in[pair] >> 4;
      }
      in = codes;
    }
    const float size = std::abs(step);
    for (int64_t j = 0; j < n; ++j) x[j] = least + static_cast<float>(in[j]) * size;
    if (std::signbit(step)) {
      for (int64_t j = 0; j < n; ++j) {
        if (in[j] > top) x[j] = special[in[j] - top - 1];
      }
    }
    write(what.values, what.format, begin, n, x);
  }
}
