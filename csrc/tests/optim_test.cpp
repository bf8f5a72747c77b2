#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "optim/pool.h"
#include "optim/update.h"

using namespace memtune::optim;

namespace {

void every_part_runs_once_whatever_the_number_of_threads() {
  for (int parts : {1, 2, 7, 3, 16}) {
    std::vector<int> ran(parts, 0);
    run_parts(parts, [&](int part) { ++ran[part]; });
    for (int count : ran) CHECK(count == 1);
  }
}

void threads_and_instruction_sets_give_the_same_bits() {
  constexpr int n = 300000 + 3;  // several stretches a thread
  const auto weights = [&](Update form, int threads) {
    std::vector<float> p(n), g(n), m(n, 0.0f), v(n, 0.0f);
    for (int i = 0; i < n; ++i) p[i] = std::sin(static_cast<float>(i)), g[i] = std::cos(static_cast<float>(3 * i));
    const Tensors tensors{p.data(), g.data(), nullptr, m.data(), v.data(), nullptr, nullptr, false};
    Numbers numbers;
    numbers.decay = 0.99f, numbers.first = 0.1f, numbers.second = 0.999f, numbers.rest = 0.001f;
    numbers.correction = 0.03f, numbers.eps = 1e-8f, numbers.rate = -0.01f;
    for (int step = 0; step < 2; ++step) update(form, Rule::adamw, Moments::float32, tensors, numbers, n, threads);
    return p;
  };
  const std::vector<float> wanted = weights(named("base"), 1);
  CHECK(named("none") == nullptr);
  for (const char* isa : {"base", "avx2", "avx512"}) {
    if (named(isa) != nullptr) CHECK(weights(named(isa), 3) == wanted);
  }
}

void a_second_moment_never_becomes_zero() {
  std::vector<float> p(kBlock, 0.0f), g(kBlock, 1e-12f), m_scale(1, 0.0f), v_scale(1, 0.0f);
  std::vector<std::uint8_t> m(kBlock, 0), v(kBlock, 0);
  g[0] = 1.0f;
  const Tensors tensors{p.data(), g.data(), nullptr, m.data(), v.data(), m_scale.data(), v_scale.data(), false};
  Numbers numbers;
  numbers.decay = 1.0f, numbers.first = 0.1f, numbers.second = 0.999f, numbers.rest = 0.001f, numbers.rate = -0.01f;
  update(best(), Rule::adamw, Moments::blocks8, tensors, numbers, kBlock, 1);
  for (std::uint8_t code : v) CHECK(code > 0);
}

}  // namespace

int main() {
  every_part_runs_once_whatever_the_number_of_threads();
  threads_and_instruction_sets_give_the_same_bits();
  a_second_moment_never_becomes_zero();
  return 0;
}
