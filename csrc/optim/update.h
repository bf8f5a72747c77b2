// One optimizer step over one tensor in host memory: the gradient is read once, master weight and moments are read and written
// once, and the narrow weight for the device is written over its gradient or to other memory.
//
// Numbers are computed in the order of torch's own optimizers (torch/optim/adamw.py and its siblings), with a fused multiply-add where
// torch's vectorised kernels have one. The result is the same whatever the width of vectors and the number of threads, and with
// float32 throughout it has the bits of torch's fused AdamW, but for its scalar tails.
#pragma once

#include <cstdint>
#include <vector>

namespace memtune::optim {

enum class Rule : std::uint8_t { adamw, sgd, adagrad, lion };

// How moments are stored. Narrow ones are rounded stochastically, so that they are right on average however small a change is.
enum class Moments : std::uint8_t {
  float32,
  bfloat16,
  blocks8,  // 8-bit floats relative to the largest of each block
};

constexpr std::int64_t kBlock = 256;  // elements that share a scale, and the unit of work

// Scalars of a step, computed in double by the caller and rounded once, as torch does. The rules read (betas b1, b2):
//          adamw                         sgd                   adagrad         lion
// decay    1 - lr*weight_decay           weight_decay          weight_decay    1 - lr*weight_decay
// first    1 - b1 (less 1 from 0.5 on)   momentum                              1 - b2
// second   b2                            1 - dampening                         1 - b1
// rest     1 - b2                                                              b2
// lookahead                              1, nesterov: momentum                 b1
// from_gradient  b1 <= 0.5               nesterov
// rate     -lr/(1 - b1^step)             -lr                   -lr/(1 + ...)   -lr
struct Numbers {
  float decay = 0, first = 0, second = 0, rest = 0, lookahead = 0;
  float correction = 1;  // adamw: sqrt(1 - b2^step)
  float eps = 0, rate = 0;
  float sign = 1;  // -1 maximizes
  bool from_gradient = false;
  std::uint64_t seed = 0;  // of stochastic rounding; each (seed, element) has a draw of its own
};

// Pointers of one tensor; what a rule or a format does not need is null.
struct Tensors {
  float* weight;         // the master
  const void* gradient;  // float, or bfloat16 where `narrow_gradient`
  std::uint16_t* out;    // bfloat16 weight; may be the gradient's own memory
  void *first, *second;  // moments
  float *first_scale, *second_scale;  // blocks8: one a block
  bool narrow_gradient;
};

// Updates elements [begin, end); `begin` is a multiple of kBlock.
using Update = void (*)(Rule, Moments, const Tensors&, const Numbers&, std::int64_t begin, std::int64_t end);

// The widest form that this machine runs, or the one named: "base", "avx2", "avx512".
Update best();
Update named(const char* isa);  // null where the machine or the build lacks it
const char* best_name();

// Updates all `n` elements on `threads` threads of a persistent pool.
void update(Update form, Rule rule, Moments moments, const Tensors& tensors, const Numbers& numbers, std::int64_t n, int threads);

// One tensor of several, and its numbers.
struct Job {
  Tensors tensors;
  const Numbers* numbers;
  std::int64_t n;
};

// Updates all `jobs`, whose memory is disjoint, with the bits of one `update` for each; threads share small tensors as well.
void update_all(Update form, Rule rule, Moments moments, const std::vector<Job>& jobs, int threads);

}  // namespace memtune::optim
