// Which of the instruction sets that loops are compiled for run on this machine.
#pragma once

#include <string_view>

namespace memtune::optim {

inline bool runs(std::string_view isa) {
#ifdef MEMTUNE_X86
  if (isa == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  }
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return isa == "base";
}

}  // namespace memtune::optim
