#include "vmm/lifetimes.h"

namespace memtune::vmm {

Pool Lifetimes::pool_of(std::int64_t bytes, std::int32_t stream) {
  if (steps_.learned() == 0) return Pool::kLasting;
  const std::int64_t row = steps_.recognise(bytes, stream);
  if (row >= 0) return pool_[static_cast<std::size_t>(row)];
  steps_.deviated(bytes, stream);
  return Pool::kLasting;
}

void Lifetimes::learn() {
  pool_.clear();
  for (const Steps::Row& row : steps_.learn()) {
    if (row.end < 0) {
      pool_.push_back(Pool::kLasting);
    } else if (row.end > steps_.period()) {
      pool_.push_back(Pool::kGradients);
    } else {
      pool_.push_back(row.end - row.start > transient_within_ ? Pool::kKept : Pool::kTransient);
    }
  }
}

}  // namespace memtune::vmm
