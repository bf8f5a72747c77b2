// Pools by lifetime after ZeRO-R (Rajbhandari et al., SC 2020): blocks of similar lifetime lie together, so that freed ones leave no
// holes between lasting ones.
#pragma once

#include <cstdint>
#include <vector>

#include "vmm/steps.h"

namespace memtune::vmm {

// kState takes what the first update requests, whatever the options; kLasting also unknown requests: all others until a step has been
// learned.
enum class Pool : std::uint8_t { kState, kLasting, kGradients, kKept, kTransient };

// Chooses each request's pool by the lifetime of the request at its place in the watched step. A wrong choice is harmless: the request
// is served from another pool.
class Lifetimes {
 public:
  Lifetimes(WatchOptions watch, std::int64_t transient_within) : steps_(any_size(watch)), transient_within_(transient_within) {}

  Pool pool_of(std::int64_t bytes, std::int32_t stream);
  void saw_allocation(std::uint64_t address, std::int64_t bytes, std::int32_t stream) { steps_.saw_allocation(address, bytes, stream); }
  void saw_free(std::uint64_t address) { steps_.saw_free(address); }
  bool end_step() { return steps_.end_step(); }
  void learn();

  const Steps& steps() const { return steps_; }

 private:
  // Steps of other batches make the same requests in the same order, of other sizes.
  static WatchOptions any_size(WatchOptions watch) {
    watch.any_size = true;
    return watch;
  }

  Steps steps_;
  std::int64_t transient_within_;  // requests and frees; what lives longer, and not beyond the step, is kept for backward
  std::vector<Pool> pool_;         // of each request of the watched step
};

}  // namespace memtune::vmm
