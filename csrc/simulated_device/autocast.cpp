// Autocast on simulated devices: the op lists are torch's own for all accelerators (ATen/autocast_mode.h), so that the casts are
// those of CUDA, not of the CPU. One boxed function per policy.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

namespace memtune::sim {
namespace {

using at::Tensor, c10::IValue, c10::ScalarType;

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Disabled {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastPrivateUse1};
};

// From the last argument to the first, the order in which GCC evaluates those of a call, and so the order of casts on a GPU.
template <typename Function>
void for_each_tensor(const c10::OperatorHandle& op, torch::jit::Stack* stack, Function function) {
  const std::size_t first = stack->size() - op.schema().arguments().size();
  for (std::size_t i = stack->size(); i-- > first;) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = function(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list = value.toTensorVector();
      for (Tensor& tensor : list) tensor = function(tensor);
      value = c10::List<Tensor>(list);
    }
  }
}

void cast_all(const c10::OperatorHandle& op, torch::jit::Stack* stack, ScalarType to) {
  const Disabled autocast;
  for_each_tensor(op, stack, [&](const Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(to, tensor, kType) : tensor;
  });
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_all(op, stack, at::autocast::get_lower_precision_fp_from_device_type(kType));
}

void full_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) { cast_all(op, stack, c10::kFloat); }

// The output is float: through the argument `dtype` unless the caller gave one.
void full_precision_output(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Disabled autocast;
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack->size() - arguments.size();
  bool eligible = false;
  for_each_tensor(op, stack, [&](const Tensor& tensor) {
    eligible = eligible || (tensor.defined() && at::autocast::is_autocast_eligible(tensor, kType) && tensor.is_floating_point());
    return tensor;
  });
  for (std::size_t i = 0; eligible && i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype" && (*stack)[first + i].isNone()) (*stack)[first + i] = c10::kFloat;
  }
  op.callBoxed(stack);
}

void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ScalarType to = at::autocast::get_lower_precision_fp_from_device_type(kType);
  for_each_tensor(op, stack, [&](const Tensor& tensor) {
    to = at::autocast::prioritize(to, tensor, kType);
    return tensor;
  });
  cast_all(op, stack, to);
}

void banned(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast: use binary_cross_entropy_with_logits, or leave autocast for it");
}

#define MEMTUNE_NAME(_1, _2, name, ...) name
#define MEMTUNE_PLAIN(op) "aten::" #op
#define MEMTUNE_OVERLOAD(op, overload) "aten::" #op "." #overload
#define MEMTUNE_OP(...) MEMTUNE_NAME(__VA_ARGS__, MEMTUNE_OVERLOAD, MEMTUNE_PLAIN)(__VA_ARGS__)
#define MEMTUNE_LOWER(...) m.impl(MEMTUNE_OP(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&lower_precision>());
#define MEMTUNE_FULL(...) m.impl(MEMTUNE_OP(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&full_precision>());
#define MEMTUNE_OUTPUT(...) m.impl(MEMTUNE_OP(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&full_precision_output>());
#define MEMTUNE_WIDEST(...) m.impl(MEMTUNE_OP(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&widest>());

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(MEMTUNE_LOWER)
  AT_FORALL_FP32(MEMTUNE_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(MEMTUNE_OUTPUT)
  AT_FORALL_PROMOTE(MEMTUNE_WIDEST)
  // Norms have no optional type: their input is cast.
  MEMTUNE_FULL(norm, Scalar)
  MEMTUNE_FULL(norm, ScalarOpt_dim)
  MEMTUNE_FULL(norm, names_ScalarOpt_dim)
  m.impl("aten::binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&banned>());
}

}  // namespace
}  // namespace memtune::sim
