#include "io/checksum.h"

#include <bit>
#include <cstring>

// The loops below become one or two instructions a lane where the machine has them; which form runs is decided at load time.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define MEMTUNE_EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define MEMTUNE_EVERY_ISA
#endif

namespace memtune::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash reads little-endian numbers");

// Constants of the specification: five 64-bit and three 32-bit primes, and the default secret.
constexpr std::uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                      0x27D4EB2F165667C5};
constexpr std::uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr std::uint64_t kAvalanche = 0x165667919E3779F9;
alignas(64) constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr std::size_t kStripe = 64, kLanes = 8, kStep = 8;
constexpr std::size_t kStripesPerBlock = (sizeof(kSecret) - kStripe) / kStep, kBlock = kStripe * kStripesPerBlock;

std::uint64_t read64(const unsigned char* at) {
  std::uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

std::uint64_t folded(std::uint64_t a, std::uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

// All stripes but the last one, which may overlap the one before it.
MEMTUNE_EVERY_ISA void accumulate(std::uint64_t* sums, const unsigned char* data, std::size_t stripes) {
  std::uint64_t sum[kLanes];
  std::memcpy(sum, sums, sizeof(sum));
  for (std::size_t n = 0; n < stripes; ++n) {
    const std::size_t stripe = n % kStripesPerBlock;
    std::uint64_t value[kLanes], key[kLanes];
    std::memcpy(value, data + n * kStripe, kStripe);
    std::memcpy(key, kSecret + stripe * kStep, kStripe);
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint64_t mixed = value[i] ^ key[i];
      sum[i] += value[i ^ 1] + (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
    if (stripe == kStripesPerBlock - 1) {
      std::memcpy(key, kSecret + sizeof(kSecret) - kStripe, kStripe);
      for (std::size_t i = 0; i < kLanes; ++i) sum[i] = ((sum[i] ^ (sum[i] >> 47)) ^ key[i]) * kPrime32[0];
    }
  }
  std::memcpy(sums, sum, sizeof(sum));
}

constexpr std::uint64_t kStart[kLanes] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                          kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
constexpr std::size_t kPiece = 32 * kBlock;  // small enough to be in the first cache when it is looked at

std::uint64_t finished(std::uint64_t* sum, const unsigned char* input, std::size_t bytes) {
  const unsigned char *last = input + bytes - kStripe, *key = kSecret + sizeof(kSecret) - kStripe - 7;
  for (std::size_t i = 0; i < kLanes; ++i) {
    const std::uint64_t value = read64(last + 8 * i), mixed = value ^ read64(key + 8 * i);
    sum[i ^ 1] += value;
    sum[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
  }
  std::uint64_t hash = bytes * kPrime64[0];
  for (std::size_t i = 0; i < kLanes; i += 2) {
    hash += folded(sum[i] ^ read64(kSecret + 11 + 8 * i), sum[i + 1] ^ read64(kSecret + 19 + 8 * i));
  }
  hash = (hash ^ (hash >> 37)) * kAvalanche;
  return hash ^ (hash >> 32);
}

}  // namespace

std::uint64_t checksum(const void* data, std::size_t bytes) {
  const auto* input = static_cast<const unsigned char*>(data);
  std::uint64_t sum[kLanes];
  std::memcpy(sum, kStart, sizeof(sum));
  accumulate(sum, input, (bytes - 1) / kStripe);
  return finished(sum, input, bytes);
}

std::uint64_t checksum_of_copy(void* to, const void* from, std::size_t bytes) {
  auto* output = static_cast<unsigned char*>(to);
  const auto* input = static_cast<const unsigned char*>(from);
  std::uint64_t sum[kLanes];
  std::memcpy(sum, kStart, sizeof(sum));
  for (std::size_t at = 0; at < bytes; at += kPiece) {
    const std::size_t here = bytes - at < kPiece ? bytes - at : kPiece;
    std::memcpy(output + at, input + at, here);
    // Whole pieces are whole blocks of the hash; the end is as in `checksum`.
    accumulate(sum, output + at, at + here == bytes ? (here - 1) / kStripe : here / kStripe);
  }
  return finished(sum, output, bytes);
}

}  // namespace memtune::io
