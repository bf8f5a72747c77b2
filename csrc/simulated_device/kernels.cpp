// Kernels of simulated devices: the CPU's, on tensors that share the memory of the device's.
//
// `run_on_cpu` is the fallback of all ops. Views and in-place ops cost nothing extra, as the CPU's tensors have the same bytes,
// sizes and strides; what a kernel allocates is moved into device memory. So results are those of the CPU, bit for bit, wherever
// ATen chooses the same op for both devices.
//
// A call is queued if its results' sizes and strides are known: the first call with the same op and sizes runs at once and shows them.
// Calls that draw random numbers, whose results' sizes depend on data, or that return numbers to the host always run at once.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "simulated_device/backend.h"

namespace memtune::sim {
namespace {

using at::Tensor, c10::IValue;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool is_simulated(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A CPU tensor over `data` with the geometry of `like`.
Tensor over(const Tensor& like, c10::Storage storage) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// The storage can be resized, into memory of the CPU; the caller looks whether it was.
c10::Storage cpu_storage(void* data, std::size_t bytes) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                              c10::DataPtr(data, c10::DeviceType::CPU), c10::GetAllocator(c10::kCPU), true);
}

Tensor on_cpu(const Tensor& tensor) {
  void* data = const_cast<void*>(tensor.storage().data());
  return over(tensor, cpu_storage(is_simulated(tensor) ? Devices::get().open(data) : data, tensor.storage().nbytes()));
}

Range range_of(const Tensor& tensor) {
  const auto base = reinterpret_cast<std::uintptr_t>(tensor.storage().data());
  if (tensor.numel() == 0 || base == 0) return {0, 0};
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  const std::int64_t first = tensor.storage_offset() * item;
  const auto end = static_cast<std::int64_t>(
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset()));
  return {base + static_cast<std::uintptr_t>(first), base + static_cast<std::uintptr_t>(end)};
}

c10::Storage new_storage(std::size_t bytes, int device) {
  const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, device_allocator()->allocate(bytes),
                                              device_allocator(), true);
}

Tensor new_tensor(c10::Storage storage, const Tensor& like) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// Where a result of a call comes from, and its geometry.
struct Result {
  enum Kind { kUndefined, kArgument, kView, kNew } kind = kUndefined;
  std::size_t index = 0;  // of the argument, of the argument's storage or of the new storage
  std::vector<std::int64_t> sizes, strides;
  std::int64_t offset = 0;
  std::size_t storage_bytes = 0;
  caffe2::TypeMeta dtype;

  bool equals(const Tensor& tensor) const {
    return tensor.sizes() == sizes && tensor.strides() == strides && tensor.storage_offset() == offset && tensor.dtype() == dtype &&
           tensor.storage().nbytes() == storage_bytes;
  }
};
struct Results {
  std::vector<std::pair<bool, std::vector<Result>>> returns;  // whether it is a list, and the tensors
  bool is_fixed = true;  // the same at each call
};

// By op and geometry of its arguments.
std::unordered_map<std::string, Results>& known_results() {
  static auto* known = new std::unordered_map<std::string, Results>;
  return *known;
}
std::mutex known_mutex;

template <typename Value>
void append(std::string& key, const Value& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void append_all(std::string& key, c10::IntArrayRef values) {
  append(key, values.size());
  for (const std::int64_t value : values) append(key, value);
}

bool is_number(const c10::Argument& argument) {
  const c10::Type* type = argument.type().get();
  if (const auto* optional = type->castRaw<c10::OptionalType>()) type = optional->getElementType().get();
  if (const auto* list = type->castRaw<c10::ListType>()) type = list->getElementType().get();
  return type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::FloatType;
}

std::vector<Tensor> tensors_of(const IValue& value) {
  return value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>{value.toTensor()};
}

// The arguments of one call, as CPU tensors.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run(const c10::OperatorHandle& kernel) {
    const auto& arguments = op_.schema().arguments();
    const std::size_t first = stack_->size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); ++i) take((*stack_)[first + i], arguments[i]);
    if (device_ < 0) device_ = current_device();
    for (std::size_t i = 0; i < arguments.size(); ++i) take_generator((*stack_)[first + i], arguments[i]);
    check_devices();
    name_ = Devices::get().name(c10::toString(op_.operator_name()));
    if (makes_view()) {
      run_kernel(kernel);
      give_all();
      return;
    }
    if (!may_wait(kernel)) return run_now(kernel);
    std::string key = key_of(first);
    if (key.empty()) return run_now(kernel);
    std::unique_lock lock(known_mutex);
    const auto known = known_results().find(key);
    const Results* results = known == known_results().end() ? nullptr : &known->second;
    lock.unlock();
    if (results == nullptr) {
      run_now(kernel);
      lock.lock();
      known_results().emplace(std::move(key), std::move(shown_));
    } else if (results->is_fixed) {
      run_later(kernel, *results, first);
    } else {
      run_now(kernel);
    }
  }

 private:
  struct Original {
    Tensor tensor, cpu;
    void* data;
  };

  Tensor take(const Tensor& tensor, bool writes) {
    places_.push_back(is_simulated(tensor) ? 'd' : 'h');
    if (!is_simulated(tensor)) {
      if (!tensor.defined() || !tensor.is_cpu()) return tensor;
      host_ = host_ || tensor.dim() > 0;
      if (writes) return tensor;
      const Quiet quiet;
      return tensor.clone();  // the call may run later
    }
    TORCH_CHECK(device_ < 0 || device_ == tensor.device().index(), "Expected all tensors to be on the same device, but found at least two "
                "devices, sim:", device_, " and sim:", static_cast<int>(tensor.device().index()), "! (in ", op_.operator_name(), ")");
    device_ = tensor.device().index();
    accesses_.push_back({range_of(tensor), writes});
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    auto storage = storages_.find(key);
    if (storage == storages_.end()) {
      storage = storages_.emplace(key, cpu_storage(Devices::get().open(tensor.storage().data()), tensor.storage().nbytes())).first;
      sources_.emplace(storage->second.unsafeGetStorageImpl(), tensor.storage());
      source_order_.push_back(storage->second.unsafeGetStorageImpl());
    }
    const Tensor cpu = over(tensor, storage->second);
    originals_.push_back({tensor, cpu, cpu.storage().mutable_data()});
    return cpu;
  }

  void take(IValue& value, const c10::Argument& argument) {
    const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    writes_ = writes_ || writes;
    if (value.isTensor()) {
      value = take(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (Tensor& tensor : list) tensor = take(tensor, writes);
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorVector();
      for (auto& tensor : list) {
        if (!tensor.has_value()) continue;
        masks_ = masks_ || tensor->scalar_type() == c10::kBool || tensor->scalar_type() == c10::kByte;
        tensor = take(*tensor, writes);
      }
      value = c10::List<std::optional<Tensor>>(list);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      const c10::Device named = value.toDevice();
      if (device_ < 0) device_ = named.has_index() ? named.index() : current_device();
      value = c10::Device(c10::kCPU);
    }
  }

  void take_generator(IValue& value, const c10::Argument& argument) {
    const auto& type = argument.type();
    const bool wanted = type->kind() == c10::TypeKind::GeneratorType ||
                        (type->kind() == c10::TypeKind::OptionalType &&
                         type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
    if (!wanted) return;
    value = cpu_generator(value.isNone() ? std::nullopt : std::optional(value.toGenerator()), device_);
    has_generator_ = true;
  }

  // As on other devices: of tensors on the host only scalars, and indices.
  void check_devices() const {
    if (!host_ || originals_.empty()) return;
    TORCH_CHECK(indexes() || op_.schema().name().starts_with("aten::index_put") || op_.schema().name() == "aten::_index_put_impl_",
                "Expected all tensors to be on the same device, but found at least two devices, sim:", device_, " and cpu! (in ",
                op_.operator_name(), ")");
  }

  bool indexes() const { return op_.schema().name() == "aten::index"; }

  bool makes_view() const {
    if (writes_) return false;
    for (const auto& returned : op_.schema().returns()) {
      if (returned.alias_info() != nullptr) return true;
    }
    return false;
  }

  // Whether the host needs the result: numbers, or a size that depends on data.
  bool host_waits() const {
    if (indexes()) return masks_;
    return op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
  }

  bool draws() const { return has_generator_ || op_.hasTag(at::Tag::nondeterministic_seeded); }

  // Kernels in Python need the interpreter's lock, which a thread may hold that waits for the devices.
  bool may_wait(const c10::OperatorHandle& kernel) const {
    const std::string& name = kernel.schema().name();
    const bool is_native = name.starts_with("aten::") || name.starts_with("memtune_sim::");
    return is_native && !originals_.empty() && !draws() && !host_waits() && !(masks_ && !indexes());
  }

  // The op and what the geometry of its results depends on; empty if that is unknown. Sizes do not depend on real numbers.
  std::string key_of(std::size_t first) const {
    std::string key = places_;
    append(key, name_);
    std::unordered_map<const void*, std::size_t> storages;
    const auto append_tensor = [&](const Tensor& tensor) {
      append(key, tensor.defined());
      if (!tensor.defined()) return;
      append(key, tensor.scalar_type());
      append_all(key, tensor.sizes());
      append_all(key, tensor.strides());
      append(key, tensor.storage_offset());
      append(key, tensor.storage().nbytes());
      append(key, storages.emplace(tensor.storage().unsafeGetStorageImpl(), storages.size()).first->second);
    };
    const std::function<bool(const IValue&, bool)> append_value = [&](const IValue& value, bool number) {
      key.push_back(value.isTensor() ? 't' : value.isInt() ? 'i' : value.isDouble() ? 'd' : value.isBool() ? 'b' : value.isNone() ? 'n' : 'o');
      if (value.isTensor()) {
        append_tensor(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) append_tensor(tensor);
      } else if (value.isOptionalTensorList()) {
        for (const auto& tensor : value.toOptionalTensorVector()) append_tensor(tensor.value_or(Tensor()));
      } else if (value.isList()) {
        const auto list = value.toList();
        append(key, list.size());
        for (const IValue& each : list) {
          if (!append_value(each, number)) return false;
        }
      } else if (value.isInt()) {
        if (!number) append(key, value.toInt());
      } else if (value.isBool()) {
        append(key, value.toBool());
      } else if (value.isString()) {
        key += value.toStringRef();
      } else {
        return value.isDouble() || value.isNone() || value.isComplexDouble() || value.isDevice();
      }
      return true;
    };
    const auto& arguments = op_.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!append_value((*stack_)[first + i], is_number(arguments[i]))) return {};
    }
    return key;
  }

  void run_now(const c10::OperatorHandle& kernel) {
    Devices::get().issue_now(current_timeline(device_), name_, accesses_, host_waits());
    run_kernel(kernel);
    for (Original& original : originals_) after_write(original);
    give_all();
  }

  void run_later(const c10::OperatorHandle& kernel, const Results& results, std::size_t first) {
    std::vector<IValue> arguments((*stack_).begin() + static_cast<std::ptrdiff_t>(first), stack_->end());
    torch::jit::drop(*stack_, arguments.size());
    std::vector<c10::Storage> made;
    std::vector<std::pair<void*, std::size_t>> targets;
    const auto tensor_of = [&](const Result& result) -> Tensor {
      if (result.kind == Result::kUndefined) return {};
      if (result.kind == Result::kArgument) return originals_[result.index].tensor;
      if (result.kind == Result::kNew && result.index == made.size()) {
        made.push_back(new_storage(result.storage_bytes, device_));
        targets.emplace_back(Devices::get().open(made.back().data()), result.storage_bytes);
      }
      const c10::Storage& storage = result.kind == Result::kNew ? made[result.index] : sources_.at(source_order_[result.index]);
      Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kKeys, result.dtype);
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes, result.strides, result.offset);
      if (result.kind == Result::kNew) accesses_.push_back({range_of(tensor), true});
      return tensor;
    };
    for (const auto& [is_list, tensors] : results.returns) {
      c10::List<Tensor> list;
      for (const Result& result : tensors) list.push_back(tensor_of(result));
      stack_->push_back(is_list ? IValue(list) : IValue(list.get(0)));
    }
    auto run = [kernel, &results, arguments = std::move(arguments), targets = std::move(targets), originals = originals_of_cpu()] {
      const Quiet quiet;
      torch::jit::Stack stack(arguments);
      kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      std::size_t moved = 0;
      for (std::size_t i = 0; i < results.returns.size(); ++i) {
        const std::vector<Tensor> tensors = tensors_of(stack[i]);
        const std::vector<Result>& wanted = results.returns[i].second;
        TORCH_INTERNAL_ASSERT(tensors.size() == wanted.size(), "results of ", kernel.operator_name(), " differ in number");
        for (std::size_t j = 0; j < tensors.size(); ++j) {
          if (wanted[j].kind == Result::kUndefined) continue;
          TORCH_INTERNAL_ASSERT(wanted[j].equals(tensors[j]), "the sizes of a result of ", kernel.operator_name(), " depend on data");
          if (wanted[j].kind != Result::kNew || wanted[j].index != moved) continue;
          std::memcpy(targets[moved].first, tensors[j].storage().data(), targets[moved].second);
          ++moved;
        }
      }
      for (const auto& [tensor, data] : originals) {
        TORCH_INTERNAL_ASSERT(tensor.storage().data() == data, kernel.operator_name(), " resized an argument");
      }
      return std::string();
    };
    Devices::get().issue(current_timeline(device_), name_, accesses_, std::move(run));
  }

  std::vector<std::pair<Tensor, void*>> originals_of_cpu() const {
    std::vector<std::pair<Tensor, void*>> all;
    for (const Original& original : originals_) all.emplace_back(original.cpu, original.data);
    return all;
  }

  // Kernels without an argument for a generator draw from the CPU's default one: it is set to the device's while they run.
  void run_kernel(const c10::OperatorHandle& kernel) {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded) || has_generator_) return call(kernel);
    at::Generator host = at::globalContext().defaultGenerator(c10::kCPU), own = cpu_generator(std::nullopt, device_);
    const auto host_state = host.unsafeGetGeneratorImpl()->get_state();
    host.unsafeGetGeneratorImpl()->set_state(*own.unsafeGetGeneratorImpl()->get_state());
    struct Restore {
      at::Generator &host, &own;
      const c10::intrusive_ptr<c10::TensorImpl>& state;
      ~Restore() {
        own.unsafeGetGeneratorImpl()->set_state(*host.unsafeGetGeneratorImpl()->get_state());
        host.unsafeGetGeneratorImpl()->set_state(*state);
      }
    } restore{host, own, host_state};
    call(kernel);
  }

  void call(const c10::OperatorHandle& kernel) {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }

  // A kernel may have resized a tensor that it writes.
  void after_write(Original& original) {
    auto& [tensor, cpu, data] = original;
    const bool moved = cpu.storage().data() != data;
    if (!moved && cpu.sizes() == tensor.sizes() && cpu.strides() == tensor.strides()) return;
    shown_.is_fixed = false;
    if (moved) {
      c10::Storage grown = new_storage(cpu.storage().nbytes(), device_);
      fill(grown, cpu.storage());
      tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr(nullptr, grown.device())));
      tensor.storage().set_nbytes(cpu.storage().nbytes());
    }
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  // Moves what a kernel has allocated into device memory, in which the bytes of the previous owner may still be in use.
  void fill(const c10::Storage& storage, const c10::Storage& cpu) {
    const auto begin = reinterpret_cast<std::uintptr_t>(storage.data());
    Devices::get().issue_now(current_timeline(device_), name_, {{{begin, begin + cpu.nbytes()}, true}}, false);
    std::memcpy(Devices::get().open(storage.mutable_data()), cpu.data(), cpu.nbytes());
  }

  Tensor give(const Tensor& tensor, Result& result) {
    if (!tensor.defined()) return tensor;
    result.sizes = tensor.sizes().vec();
    result.strides = tensor.strides().vec();
    result.offset = tensor.storage_offset();
    result.storage_bytes = tensor.storage().nbytes();
    result.dtype = tensor.dtype();
    for (std::size_t i = 0; i < originals_.size(); ++i) {
      if (originals_[i].cpu.unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl()) continue;
      result.kind = Result::kArgument;
      result.index = i;
      return originals_[i].tensor;
    }
    c10::StorageImpl* key = tensor.storage().unsafeGetStorageImpl();
    auto source = sources_.find(key);
    const auto order = std::find(source_order_.begin(), source_order_.end(), key);
    result.kind = order == source_order_.end() ? Result::kNew : Result::kView;
    result.index = static_cast<std::size_t>(order - source_order_.begin());
    if (source == sources_.end()) {
      c10::Storage storage = new_storage(tensor.storage().nbytes(), device_);
      fill(storage, tensor.storage());
      source = sources_.emplace(key, std::move(storage)).first;
      kept_.push_back(tensor);  // so that no later result has a storage at the same address
    }
    if (result.kind == Result::kNew) {
      const auto same = [&](const Tensor& each) { return each.storage().unsafeGetStorageImpl() == key; };
      result.index = static_cast<std::size_t>(std::find_if(kept_.begin(), kept_.end(), same) - kept_.begin());
    }
    return new_tensor(source->second, tensor);
  }

  void give_all() {
    const std::size_t returns = op_.schema().returns().size();
    for (std::size_t i = stack_->size() - returns; i < stack_->size(); ++i) {
      IValue& value = (*stack_)[i];
      if (!value.isTensor() && !value.isTensorList()) {
        shown_.is_fixed = false;
        continue;
      }
      const bool is_list = value.isTensorList();
      std::vector<Tensor> tensors = tensors_of(value);
      std::vector<Result> results(tensors.size());
      for (std::size_t j = 0; j < tensors.size(); ++j) tensors[j] = give(tensors[j], results[j]);
      value = is_list ? IValue(c10::List<Tensor>(tensors)) : IValue(tensors[0]);
      shown_.returns.emplace_back(is_list, std::move(results));
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const std::string* name_ = nullptr;
  int device_ = -1;
  std::string places_;  // of the tensors, in order: results are found by their number among those of the device
  bool host_ = false, writes_ = false, masks_ = false, has_generator_ = false;
  std::vector<Access> accesses_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // of the device: of the CPU
  std::unordered_map<c10::StorageImpl*, c10::Storage> sources_;   // of the CPU: of the device
  std::vector<c10::StorageImpl*> source_order_;                   // of the arguments, on the CPU
  std::vector<Original> originals_;
  std::vector<Tensor> kept_;
  Results shown_;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(op); }

// ATen leaves convolutions of other devices to two ops of their own, which the CPU lacks.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("memtune_sim::convolution", "");
  Call(op, stack).run(kernel);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("memtune_sim::convolution_backward", "");
  Call(op, stack).run(kernel);
}

// Tensors without kernels

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void grow(const c10::Storage& storage, std::size_t bytes) {
  if (bytes > storage.nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, bytes);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic_size, std::optional<c10::MemoryFormat> format) {
  const c10::IntArrayRef size = C10_AS_INTARRAYREF_SLOW(symbolic_size);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    if (self.numel() > 0) grow(self.storage(), at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset()));
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  const c10::IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size), given = C10_AS_INTARRAYREF_SLOW(stride);
  const std::int64_t first = offset.expect_int();
  at::native::checkSetStorage(self, source, first, sizes, given);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(first);
  if (given.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, given, first);
  }
  if (self.numel() > 0) {
    grow(self.storage(), at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), static_cast<std::size_t>(first)));
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto items = static_cast<std::int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {c10::SymInt(items)}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  return set_storage_offset(self, new_storage(0, self.device().index()), 0, {c10::SymInt(0)}, {});
}

// Copies

bool is_dense(const Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

void move_bytes(Tensor target, const Tensor& source) {
  const Quiet quiet;
  target.copy_(source);
}

std::vector<char> bytes_of(const Tensor& cpu) {
  const char* begin = static_cast<const char*>(cpu.const_data_ptr());
  return {begin, begin + cpu.nbytes()};
}

// A copy between pinned memory and a device. The host must not touch pinned memory meanwhile: a source that it changed is found,
// and a target holds the pattern of freed memory until the copy is over.
class PinnedCopy {
 public:
  PinnedCopy(const Tensor& self, const Tensor& dst) : source_(on_cpu(self)), target_(on_cpu(dst)), up_(is_simulated(dst)) {
    const Tensor& pinned = up_ ? self : dst;
    if (!is_dense(pinned) || Devices::get().is_queued(range_of(pinned))) return;  // an earlier copy uses the same bytes
    if (!up_) std::memset(target_.mutable_data_ptr(), 0xFF, target_.nbytes());
    before_ = bytes_of(up_ ? source_ : target_);
  }
  std::string run() const {
    const Tensor& pinned = up_ ? source_ : target_;
    const bool changed = !before_.empty() && std::memcmp(before_.data(), pinned.const_data_ptr(), before_.size()) != 0;
    move_bytes(target_, source_);
    return !changed ? "" : up_ ? "the host writes the pinned source" : "the host writes the pinned target";
  }

 private:
  Tensor source_, target_;
  bool up_;                   // to the device
  std::vector<char> before_;  // the pinned bytes when it was issued, if they are dense
};

void copy_now(int timeline, const std::string* name, const Tensor& self, const Tensor& dst) {
  std::vector<Access> accesses;
  const auto seen = [](const Tensor& tensor) { return is_simulated(tensor) || Devices::get().is_pinned(tensor.storage().data()); };
  if (seen(self)) accesses.push_back({range_of(self), false});
  if (seen(dst)) accesses.push_back({range_of(dst), true});
  Devices::get().issue_now(timeline, name, accesses, true);
  move_bytes(on_cpu(dst), on_cpu(self));
}

Tensor copy_from(const Tensor& from, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  Tensor self = from;
  if (self.sizes() != dst.sizes()) {
    const Quiet quiet;
    self = self.expand(dst.sizes());
  }
  Devices& devices = Devices::get();
  if (is_simulated(self) && is_simulated(dst)) {
    const int source = self.device().index(), target = dst.device().index();
    const int line = current_timeline(source), other = current_timeline(target);
    const auto issue = [&](const char* op) {
      devices.issue(line, devices.name(op), {{range_of(self), false}, {range_of(dst), true}}, [from = on_cpu(self), to = on_cpu(dst)] {
        move_bytes(to, from);
        return std::string();
      });
    };
    if (source == target) {
      issue("aten::copy_");
    } else {  // both streams, as between two GPUs
      devices.wait_timeline(line, other);
      issue("aten::copy_ (device to device)");
      devices.wait_timeline(other, line);
    }
    return dst;
  }
  const bool down = is_simulated(self);
  const int timeline = current_timeline((down ? self : dst).device().index());
  const std::string* name = devices.name(down ? "aten::copy_ (device to host)" : "aten::copy_ (host to device)");
  const Tensor& host = down ? dst : self;
  if (non_blocking && devices.is_pinned(host.storage().data())) {
    const auto copy = std::make_shared<PinnedCopy>(self, dst);
    devices.issue(timeline, name, {{range_of(self), false}, {range_of(dst), true}}, [copy] { return copy->run(); }, range_of(host));
  } else if (non_blocking && !down) {  // from pageable memory the bytes are taken at once
    const Quiet quiet;
    devices.issue(timeline, name, {{range_of(dst), true}}, [taken = self.clone(), to = on_cpu(dst)] {
      move_bytes(to, taken);
      return std::string();
    });
  } else {
    copy_now(timeline, name, self, dst);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// F.dropout is this op on any device but the CPU, where it multiplies by noise: so does this.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(c10::kBool))};
  if (p == 0 || p == 1) {
    const Tensor mask = at::full_like(input, 1 - p, input.options().dtype(c10::kBool));
    return {input.mul(mask), mask};
  }
  Tensor noise = at::empty_like(input, input.options(), c10::MemoryFormat::Contiguous).bernoulli_(1 - p);
  const Tensor mask = noise.to(c10::kBool);
  return {input.mul(noise.div_(1 - p)), mask};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return grad.mul(scale == 0 ? mask : mask.to(grad.scalar_type()).div_(1 / scale));
}

// `tensor.data = other` between host and device, by which Module.to moves parameters and keeps them tied.
bool has_compatible_type(const Tensor& self, const Tensor& from) {
  const auto is_dense_type = [](const Tensor& tensor) { return tensor.layout() == c10::kStrided && (tensor.is_cpu() || tensor.is_privateuseone()); };
  return is_dense_type(self) && is_dense_type(from);
}

// Attention takes the CPU's choice, and with it its kernel. The choice reads no values.
std::int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                              double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const Quiet quiet;
  const auto seen = [](const Tensor& tensor) { return is_simulated(tensor) ? on_cpu(tensor).set_requires_grad(tensor.requires_grad()) : tensor; };
  return at::_fused_sdp_choice(seen(query), seen(key), seen(value), mask.has_value() ? std::optional(seen(*mask)) : mask, dropout, causal,
                               scale, grouped);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  // ATen decomposes these on devices without a kernel of their own; the CPU has one.
  for (const char* op : {"_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out",
                         "linalg__powsum", "mish_backward", "native_channel_shuffle", "native_group_norm", "native_layer_norm",
                         "silu_backward"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

using Ints = c10::IntArrayRef;

// An op of others, such as a collective, on the current stream of the tensors' device.
void use(const std::vector<Tensor>& reads, const std::vector<Tensor>& writes, const std::string& name) {
  std::vector<Access> accesses;
  int device = current_device();
  for (const bool is_write : {false, true}) {
    for (const Tensor& tensor : is_write ? writes : reads) {
      if (!is_simulated(tensor)) continue;
      device = tensor.device().index();
      accesses.push_back({range_of(tensor), is_write});
    }
  }
  Devices::get().issue_now(current_timeline(device), Devices::get().name(name), accesses, false);
}

TORCH_LIBRARY_FRAGMENT(memtune_sim, m) {
  m.def("use(Tensor[] reads, Tensor[] writes, str name) -> ()", use);
  m.def("kernel_view(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return on_cpu(tensor); });
  m.def("convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed, "
        "int[] output_padding, int groups) -> Tensor");
  m.def("convolution_backward(Tensor grad, Tensor input, Tensor weight, int[] stride, int[] padding, int[] dilation, bool transposed, "
        "int[] output_padding, int groups, bool[3] mask) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(memtune_sim, CPU, m) {
  m.impl("convolution", [](const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Ints stride, Ints padding,
                           Ints dilation, bool transposed, Ints output_padding, std::int64_t groups) {
    return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  });
  m.impl("convolution_backward", [](const Tensor& grad, const Tensor& input, const Tensor& weight, Ints stride, Ints padding, Ints dilation,
                                    bool transposed, Ints output_padding, std::int64_t groups, std::array<bool, 3> mask) {
    const std::int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    const std::vector<std::int64_t> bias{channels};
    return at::convolution_backward(grad, input, weight, Ints(bias), stride, padding, dilation, transposed, output_padding, groups, mask);
  });
}

}  // namespace
}  // namespace memtune::sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &memtune::sim::attention_choice)
}
