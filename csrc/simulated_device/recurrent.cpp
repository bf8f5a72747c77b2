// Fused cells of LSTM and GRU, which devices have and the CPU lacks: made of the CPU's ops. ATen derives nothing inside a cell; it calls
// these backwards with what the forward kept.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "simulated_device/backend.h"

namespace memtune::sim {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

bool there(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) { return there(bias) ? gates + *bias : gates; }

Tensor of_sigmoid(const Tensor& gradient, const Tensor& value) { return gradient * value * (1 - value); }

Tensor of_tanh(const Tensor& gradient, const Tensor& value) { return gradient * (1 - value * value); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell, const MaybeTensor& input_bias,
                                             const MaybeTensor& hidden_bias) {
  const Quiet quiet;
  const std::vector<Tensor> gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& of_hidden, const MaybeTensor& of_cell, const Tensor& cell,
                                                      const Tensor& next, const Tensor& kept, bool has_bias) {
  if (!there(of_hidden) && !there(of_cell)) return {};
  const Quiet quiet;
  const std::vector<Tensor> gates = kept.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
  const Tensor shown = next.tanh();
  Tensor of_next = there(of_cell) ? *of_cell : next.mul(0);
  Tensor of_out = out.mul(0);
  if (there(of_hidden)) {
    of_next = of_next + of_tanh(*of_hidden * out, shown);
    of_out = of_sigmoid(*of_hidden * shown, out);
  }
  const Tensor of_gates =
      at::cat({of_sigmoid(of_next * fresh, in), of_sigmoid(of_next * cell, forget), of_tanh(of_next * in, fresh), of_out}, 1);
  return {of_gates, of_next * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state, const MaybeTensor& input_bias,
                                    const MaybeTensor& hidden_bias) {
  const Quiet quiet;
  const std::vector<Tensor> mine = with_bias(input, input_bias).chunk(3, 1), theirs = with_bias(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (mine[0] + theirs[0]).sigmoid(), update = (mine[1] + theirs[1]).sigmoid();
  const Tensor fresh = (mine[2] + reset * theirs[2]).tanh();
  return {fresh + update * (state - fresh), at::cat({reset, update, fresh, state, theirs[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient, const Tensor& kept, bool has_bias) {
  const Quiet quiet;
  const std::vector<Tensor> parts = kept.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &state = parts[3], &theirs = parts[4];
  const Tensor of_update = of_sigmoid(gradient * (state - fresh), update), of_fresh = of_tanh(gradient * (1 - update), fresh);
  const Tensor of_reset = of_sigmoid(of_fresh * theirs, reset);
  const Tensor of_input = at::cat({of_reset, of_update, of_fresh}, 1), of_hidden = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {of_input, of_hidden, gradient * update, has_bias ? of_input.sum(0) : Tensor(), has_bias ? of_hidden.sum(0) : Tensor()};
}

}  // namespace
}  // namespace memtune::sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", memtune::sim::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", memtune::sim::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", memtune::sim::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", memtune::sim::gru_cell_backward);
}
