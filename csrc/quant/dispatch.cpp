#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "optim/isa.h"
#include "optim/pool.h"
#include "quant/quantise.h"

namespace memtune::quant {

extern const Form quantise_base;
#ifdef MEMTUNE_X86
extern const Form quantise_avx2, quantise_avx512;
#endif

namespace {

template <typename Work>
void in_parts(std::int64_t blocks, std::int64_t block, int threads, Work work) {
  // Waking a thread takes some microseconds, in which one of them packs some ten thousand values.
  const std::int64_t least = std::max<std::int64_t>(1, 16384 / block);
  const std::int64_t parts = std::clamp<std::int64_t>(blocks / least, 1, std::max(threads, 1));
  const std::int64_t each = (blocks + parts - 1) / parts;
  optim::run_parts(static_cast<int>(parts), [&](int part) {
    const std::int64_t first = part * each, last = std::min(blocks, first + each);
    if (first < last) work(first, last);
  });
}

}  // namespace

Row row_of(std::span<const std::int64_t> lengths, int bits, std::int64_t block) {
  if (bits != 4 && bits != 8) throw std::invalid_argument("bits must be 4 or 8");
  if (block < 2 || block > 4096 || block % 2) throw std::invalid_argument("block must be even and within 2 and 4096");
  Row row{.bits = bits, .block = block};
  std::int64_t scales = 0, kept = 0, codes = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t count = lengths[i];
    if (count < 0) throw std::invalid_argument("a stretch has less than no values");
    if (count > 0 && i % 2 == 0) {
      row.stretches.push_back({row.numel, count, scales, -1, codes});
      scales += (count + block - 1) / block;
      codes += bits == 8 ? count : (count + 1) / 2;
    } else if (count > 0) {
      row.stretches.push_back({row.numel, count, -1, kept, -1});
      kept += count;
    }
    row.numel += count;
  }
  row.kept_at = 4 * scales;
  row.codes_at = row.kept_at + 4 * kept;
  row.n_bytes = (row.codes_at + codes + 15) / 16 * 16;
  return row;
}

Groups groups_of(std::int64_t numel, int bits, std::int64_t group) {
  if (bits != 4 && bits != 8) throw std::invalid_argument("bits must be 4 or 8");
  if (group < 2 || group > 4096 || group % 2) throw std::invalid_argument("group must be even and within 2 and 4096");
  if (numel < 0) throw std::invalid_argument("a tensor has less than no values");
  Groups found{.bits = bits, .group = group, .numel = numel, .count = (numel + group - 1) / group};
  found.codes_at = 8 * found.count;
  found.n_bytes = (found.codes_at + (bits == 8 ? numel : (numel + 1) / 2) + 15) / 16 * 16;
  return found;
}

std::int64_t blocks_in(const Row& row) {
  std::int64_t blocks = 0;
  for (const Stretch& s : row.stretches) blocks += (s.count + row.block - 1) / row.block;
  return blocks;
}

const Form* named(const char* isa) {
  if (!optim::runs(isa)) return nullptr;
#ifdef MEMTUNE_X86
  if (std::string_view(isa) == "avx512") return &quantise_avx512;
  if (std::string_view(isa) == "avx2") return &quantise_avx2;
#endif
  return &quantise_base;
}

const Form* best() {
  static const Form* found = named(optim::runs("avx512") ? "avx512" : optim::runs("avx2") ? "avx2" : "base");
  return found;
}

void pack(const Form& form, const Row& row, const Packing& what, int threads) {
  in_parts(what.rows * blocks_in(row), row.block, threads,
           [&](std::int64_t first, std::int64_t last) { form.pack(row, what, first, last); });
}

void unpack(const Form& form, const Row& row, const Unpacking& what, int threads) {
  in_parts(what.rows * blocks_in(row), row.block, threads,
           [&](std::int64_t first, std::int64_t last) { form.unpack(row, what, first, last); });
}

void compress(const Form& form, const Groups& groups, const Compressing& what, int threads) {
  in_parts(groups.count, groups.group, threads,
           [&](std::int64_t first, std::int64_t last) { form.compress(groups, what, first, last); });
}

void decompress(const Form& form, const Groups& groups, const Decompressing& what, int threads) {
  in_parts(groups.count, groups.group, threads,
           [&](std::int64_t first, std::int64_t last) { form.decompress(groups, what, first, last); });
}

}  // namespace memtune::quant
