#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "quant/quantise.h"

using namespace memtune::quant;

namespace {

std::vector<float> some(std::int64_t n) {
  std::vector<float> x(n);
  for (std::int64_t i = 0; i < n; ++i) x[i] = std::sin(static_cast<float>(7 * i + 1)) * std::exp2(static_cast<float>(i % 9));
  return x;
}

void threads_and_instruction_sets_give_the_same_bits() {
  const std::int64_t lengths[] = {5000, 7, 40001};
  for (int bits : {4, 8}) {
    const Row row = row_of(lengths, bits, 48);
    const std::vector<float> x = some(4 * row.numel);
    const auto packed = [&](const Form& form, int threads) {
      std::vector<std::uint8_t> out(4 * row.n_bytes, 0);
      pack(form, row, {x.data(), Format::float32, nullptr, 4, 2, out.data()}, threads);
      return out;
    };
    const auto sums = [&](const Form& form, const std::vector<std::uint8_t>& data, int threads) {
      std::vector<float> out(2 * row.numel);
      unpack(form, row, {data.data(), 2, 2, 0.5f, out.data(), Format::float32}, threads);
      return out;
    };
    const std::vector<std::uint8_t> wanted = packed(*named("base"), 1);
    const std::vector<float> back = sums(*named("base"), wanted, 1);
    for (const char* isa : {"base", "avx2", "avx512"}) {
      if (named(isa) == nullptr) continue;
      CHECK(packed(*named(isa), 3) == wanted);
      CHECK(sums(*named(isa), wanted, 3) == back);
    }
  }
  CHECK(named("none") == nullptr);
}

void groups_have_the_same_bits_and_an_error_below_a_step() {
  const std::vector<float> x = some(40001);
  for (int bits : {4, 8}) {
    const Groups groups = groups_of(40001, bits, 48);
    const auto packed = [&](const Form& form, int threads) {
      std::vector<std::uint8_t> out(groups.n_bytes, 0);
      compress(form, groups, {x.data(), Format::float32, 7, true, out.data()}, threads);
      return out;
    };
    const std::vector<std::uint8_t> wanted = packed(*named("base"), 1);
    std::vector<float> back(x.size());
    for (const char* isa : {"base", "avx2", "avx512"}) {
      if (named(isa) == nullptr) continue;
      CHECK(packed(*named(isa), 3) == wanted);
      decompress(*named(isa), groups, {wanted.data(), back.data(), Format::float32}, 3);
      for (std::size_t i = 0; i < x.size(); ++i) {
        float step;
        std::memcpy(&step, wanted.data() + 8 * (i / 48) + 4, sizeof(float));
        CHECK(std::abs(back[i] - x[i]) <= 1.001f * step);
      }
    }
  }
}

void a_row_has_scales_then_kept_values_then_codes() {
  const std::int64_t lengths[] = {3, 2, 0, 1, 5};
  const Row row = row_of(lengths, 4, 2);
  CHECK(row.numel == 11);
  CHECK(row.kept_at == 4 * (2 + 3));
  CHECK(row.codes_at == row.kept_at + 4 * 3);
  CHECK(row.n_bytes == 48);  // 32 + 2 + 3, rounded up
  CHECK(blocks_in(row) == 2 + 1 + 1 + 3);
}

void what_is_no_row_is_refused() {
  const std::int64_t fine[] = {3}, negative[] = {-3};
  const auto refused = [](std::span<const std::int64_t> lengths, int bits, std::int64_t block) {
    try {
      row_of(lengths, bits, block);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused(fine, 8, 256));
  CHECK(refused(negative, 8, 256));
  CHECK(refused(fine, 5, 256));
  CHECK(refused(fine, 8, 3));
  CHECK(refused(fine, 8, 8192));
}

}  // namespace

int main() {
  threads_and_instruction_sets_give_the_same_bits();
  groups_have_the_same_bits_and_an_error_below_a_step();
  a_row_has_scales_then_kept_values_then_codes();
  what_is_no_row_is_refused();
  return 0;
}
