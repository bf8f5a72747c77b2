// Kernels of simulated devices: the CPU's, on tensors that share the memory of the device's.
//
// `run_on_cpu` is the fallback of all ops. Views and in-place ops cost nothing extra, as the CPU's tensors have the same bytes,
// sizes and strides; what a kernel allocates is moved into device memory. So results are those of the CPU, bit for bit, wherever
// ATen chooses the same op for both devices.
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

#include <cstring>
#include <unordered_map>

#include "simulated_device/backend.h"

namespace memtune::sim {
namespace {

using at::Tensor, c10::IValue;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Dispatch of ops that are no ops of the user: modes, autograd and autocast do not see them.
struct Quiet {
  c10::impl::ExcludeDispatchKeyGuard excluded{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                                              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

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
    const std::string* name = Devices::get().name(c10::toString(op_.operator_name()));
    const int timeline = current_timeline(device_);
    if (!makes_view()) {
      const bool waits = op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
      Devices::get().issue(timeline, name, accesses_, waits);
    }
    run_kernel(kernel);
    for (auto& [impl, original] : originals_) after_write(original);
    accesses_.clear();
    const std::size_t returns = op_.schema().returns().size();
    for (std::size_t i = stack_->size() - returns; i < stack_->size(); ++i) give((*stack_)[i]);
    if (!accesses_.empty()) Devices::get().issue(timeline, name, accesses_, false);
  }

  int device() const { return device_; }

 private:
  struct Original {
    Tensor tensor, cpu;
    void* data;
  };

  Tensor take(const Tensor& tensor, bool writes) {
    if (!is_simulated(tensor)) {
      if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) host_ = true;
      return tensor;
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
    }
    const Tensor cpu = over(tensor, storage->second);
    originals_.push_back({cpu.unsafeGetTensorImpl(), {tensor, cpu, cpu.storage().mutable_data()}});
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
        if (tensor.has_value()) tensor = take(*tensor, writes);
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
  }

  // As on other devices: of tensors on the host only scalars, and indices.
  void check_devices() const {
    if (!host_ || originals_.empty()) return;
    const std::string& name = op_.schema().name();
    const bool indexes = name == "aten::index" || name == "aten::index_put" || name == "aten::_index_put_impl_" || name == "aten::index_put_";
    TORCH_CHECK(indexes, "Expected all tensors to be on the same device, but found at least two devices, sim:", device_,
                " and cpu! (in ", op_.operator_name(), ")");
  }

  bool makes_view() const {
    if (writes_) return false;
    for (const auto& returned : op_.schema().returns()) {
      if (returned.alias_info() != nullptr) return true;
    }
    return false;
  }

  // Kernels without an argument for a generator draw from the CPU's default one: it is set to the device's while they run.
  void run_kernel(const c10::OperatorHandle& kernel) {
    bool has_generator = false;
    for (const IValue& value : *stack_) has_generator = has_generator || value.isGenerator();
    if (!op_.hasTag(at::Tag::nondeterministic_seeded) || has_generator) return call(kernel);
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
    if (moved) {
      c10::Storage grown = new_storage(cpu.storage().nbytes(), device_);
      std::memcpy(Devices::get().open(grown.data()), cpu.storage().data(), cpu.storage().nbytes());
      tensor.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr(nullptr, grown.device())));
      tensor.storage().set_nbytes(cpu.storage().nbytes());
    }
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    Devices::get().issue(current_timeline(device_), Devices::get().name(c10::toString(op_.operator_name())), {{range_of(tensor), true}},
                         false);
  }

  Tensor give(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [impl, original] : originals_) {
      if (impl == result.unsafeGetTensorImpl()) return original.tensor;
    }
    c10::StorageImpl* key = result.storage().unsafeGetStorageImpl();
    if (const auto source = sources_.find(key); source != sources_.end()) return new_tensor(source->second, result);
    const std::size_t bytes = result.storage().nbytes();
    c10::Storage storage = new_storage(bytes, device_);
    std::memcpy(Devices::get().open(storage.data()), result.storage().data(), bytes);
    sources_.emplace(key, storage);
    kept_.push_back(result);  // so that no later result has a storage at the same address
    const Tensor made = new_tensor(std::move(storage), result);
    accesses_.push_back({range_of(made), true});
    return made;
  }

  void give(IValue& value) {
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (Tensor& tensor : list) tensor = give(tensor);
      value = c10::List<Tensor>(list);
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  int device_ = -1;
  bool host_ = false, writes_ = false;
  std::vector<Access> accesses_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // of the device: of the CPU
  std::unordered_map<c10::StorageImpl*, c10::Storage> sources_;   // of the CPU: of the device
  std::vector<std::pair<c10::TensorImpl*, Original>> originals_;
  std::vector<Tensor> kept_;
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

// A deferred copy. The host must not touch pinned memory meanwhile: a source that it changed is found, and a target holds the pattern
// of freed memory until the copy is over.
struct DeferredCopy {
  Tensor source, target;
  bool up;                   // to the device
  std::vector<char> before;  // the pinned bytes when it was issued, if they are dense
  Tensor taken;
  bool changed = false;

  DeferredCopy(const Tensor& self, const Tensor& dst) : source(on_cpu(self)), target(on_cpu(dst)), up(is_simulated(dst)) {
    const Tensor& host = up ? source : target;
    if (!is_dense(host)) return;
    if (!up) std::memset(host.mutable_data_ptr(), 0xFF, host.nbytes());
    before = bytes_of(host);
  }
  void compare(const Tensor& host) {
    changed = changed || (!before.empty() && std::memcmp(before.data(), host.const_data_ptr(), before.size()) != 0);
  }
  void read() {
    if (taken.defined()) return;
    if (up) compare(source);
    const Quiet quiet;
    taken = source.clone();
  }
  std::string complete() {
    if (!up) compare(target);
    if (!taken.defined() && up) compare(source);
    move_bytes(target, taken.defined() ? taken : source);
    return !changed ? "" : up ? "the host writes the pinned source" : "the host writes the pinned target";
  }
};

void copy_deferred(int timeline, const std::string* name, const Tensor& self, const Tensor& dst) {
  Devices::get().issue_copy(timeline, name, range_of(self), range_of(dst), [&] {
    const auto copy = std::make_shared<DeferredCopy>(self, dst);
    return Devices::CopyWork{[copy] { copy->read(); }, [copy] { return copy->complete(); }};
  });
}

void copy_now(int timeline, const std::string* name, const Tensor& self, const Tensor& dst, bool waits) {
  std::vector<Access> accesses;
  const auto seen = [](const Tensor& tensor) { return is_simulated(tensor) || Devices::get().is_pinned(tensor.storage().data()); };
  if (seen(self)) accesses.push_back({range_of(self), false});
  if (seen(dst)) accesses.push_back({range_of(dst), true});
  Devices::get().issue(timeline, name, accesses, waits);
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
    if (source == target) {
      copy_now(line, devices.name("aten::copy_"), self, dst, false);
    } else {  // both streams, as between two GPUs
      devices.wait_timeline(line, other);
      copy_now(line, devices.name("aten::copy_ (device to device)"), self, dst, false);
      devices.wait_timeline(other, line);
    }
    return dst;
  }
  const bool down = is_simulated(self);
  const int timeline = current_timeline((down ? self : dst).device().index());
  const std::string* name = devices.name(down ? "aten::copy_ (device to host)" : "aten::copy_ (host to device)");
  const bool pinned = devices.is_pinned((down ? dst : self).storage().data());
  if (non_blocking && pinned) {
    copy_deferred(timeline, name, self, dst);
  } else {  // from pageable memory the bytes are taken at once, to pageable memory the host waits
    copy_now(timeline, name, self, dst, down || !non_blocking);
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

// Attention takes the CPU's choice, and with it its kernel.
std::int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                              double dropout, bool causal, std::optional<double> scale, bool grouped) {
  return at::_fused_sdp_choice(query, key, value, mask, dropout, causal, scale, grouped);
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
  Devices::get().issue(current_timeline(device), Devices::get().name(name), accesses, false);
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
