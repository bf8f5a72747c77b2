#include <algorithm>
#include <atomic>
#include <string_view>
#include <vector>

#include "optim/isa.h"
#include "optim/pool.h"
#include "optim/update.h"

namespace memtune::optim {

void update_base(Rule, Moments, const Tensors&, const Numbers&, std::int64_t, std::int64_t);
#ifdef MEMTUNE_X86
void update_avx2(Rule, Moments, const Tensors&, const Numbers&, std::int64_t, std::int64_t);
void update_avx512(Rule, Moments, const Tensors&, const Numbers&, std::int64_t, std::int64_t);
#endif

Update named(const char* isa) {
  if (!runs(isa)) return nullptr;
#ifdef MEMTUNE_X86
  if (std::string_view(isa) == "avx512") return update_avx512;
  if (std::string_view(isa) == "avx2") return update_avx2;
#endif
  return update_base;
}

const char* best_name() { return runs("avx512") ? "avx512" : runs("avx2") ? "avx2" : "base"; }

Update best() {
  static const Update found = named(best_name());
  return found;
}

namespace {

// Waking a thread takes some microseconds, in which one of them updates some ten thousand elements.
constexpr std::int64_t least = 64 * kBlock;

}  // namespace

void update(Update form, Rule rule, Moments moments, const Tensors& tensors, const Numbers& numbers, std::int64_t n, int threads) {
  const std::int64_t parts = std::clamp<std::int64_t>(n / least, 1, std::max(threads, 1));
  // Threads take stretches as they come to them: one that other work holds up does not hold up the rest.
  const std::int64_t stretch = std::min(4 * least, ((n + parts - 1) / parts + kBlock - 1) / kBlock * kBlock);
  std::atomic<std::int64_t> next = 0;
  run_parts(static_cast<int>(parts), [&](int) {
    for (std::int64_t begin; (begin = next.fetch_add(stretch, std::memory_order_relaxed)) < n;) {
      form(rule, moments, tensors, numbers, begin, std::min(n, begin + stretch));
    }
  });
}

void update_all(Update form, Rule rule, Moments moments, const std::vector<Job>& jobs, int threads) {
  struct Stretch {
    const Job* job;
    std::int64_t begin;
  };
  std::vector<Stretch> stretches;
  std::int64_t elements = 0;
  for (const Job& job : jobs) {
    elements += job.n;
    for (std::int64_t begin = 0; begin < job.n; begin += 4 * least) stretches.push_back({&job, begin});
  }
  const std::int64_t parts = std::clamp<std::int64_t>(elements / least, 1, std::max(threads, 1));
  std::atomic<std::size_t> next = 0;
  run_parts(static_cast<int>(parts), [&](int) {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < stretches.size();) {
      const auto& [job, begin] = stretches[i];
      form(rule, moments, job->tensors, *job->numbers, begin, std::min(job->n, begin + 4 * least));
    }
  });
}

}  // namespace memtune::optim
