// The operators that need more than the CPU's kernel on a stream: allocation, views, storages, copies, and what reads
// a value back.
//
// 1. A copy between the device and pinned, dense host memory of the same dtype is asynchronous, and only then.  Unless
//    it is non_blocking, the host waits for it.
// 2. A copy from any other host memory is staged: the bytes are read before the call returns.
// 3. A copy to any other host memory is waited for.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstring>
#include <memory>

#include "allocator.h"
#include "counters.h"
#include "device_memory.h"
#include "pinned.h"
#include "runtime.h"
#include "streams.h"
#include "tensors.h"

namespace openreg {

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

at::Tensor reachable(const at::Tensor& tensor) {
  void* memory = DeviceMemory::instance().reachable(tensor.const_data_ptr());
  auto view = at::from_blob(
      memory, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------ allocation

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  const size_t needed_bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (impl->numel() > 0 && needed_bytes > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), needed_bytes);
  }
  if (format.has_value()) {
    impl->empty_tensor_restride(*format);
  }
  return tensor;
}

// ------------------------------------------------------------------ views: the host's work, no kernels

Tensor as_strided(const Tensor& tensor, SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<SymInt> offset) {
  std::optional<int64_t> plain_offset;
  if (offset.has_value()) {
    plain_offset = offset->guard_int(__FILE__, __LINE__);
  }
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), plain_offset);
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor view(const Tensor& tensor, SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

// ------------------------------------------------------------------ storages

Tensor& set_from_storage(Tensor& tensor, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {elements}, {});
}

Tensor& set_from_storage_at(
    Tensor& tensor, at::Storage storage, SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(
      tensor, std::move(storage), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(sizes),
      C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor& set_to_nothing(Tensor& tensor) {
  at::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, device_allocator().allocate(0), &device_allocator(), true));
  return at::native::set_storage_cpu_(tensor, std::move(storage), 0, {0}, {});
}

// ------------------------------------------------------------------ copies

bool are_bytes_alike(const Tensor& one, const Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() && one.strides() == other.strides() &&
      one.is_non_overlapping_and_dense() && one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

enum class Host { kGoesOn, kWaits };

Load load(Engine engine, size_t nbytes, bool is_needed = false) {
  return {engine, static_cast<double>(nbytes), 0, is_needed};
}

// Between the device and pinned memory: `host` is the address to be guarded.
void copy_pinned(void* to, const void* from, size_t nbytes, const void* host, Host then, Engine engine) {
  const StreamId stream = current_stream();
  count(Counter::kAsynchronousCopies);
  enqueue(stream, Work::kCopy, [=] { std::memmove(to, from, nbytes); }, load(engine, nbytes));
  note_copy(host, stream);
  if (then == Host::kWaits) {
    synchronize(stream);
  }
}

void copy_within_device(const Tensor& to, const Tensor& from) {
  auto target = reachable(to);
  auto source = reachable(from);
  enqueue(
      current_stream(), Work::kKernel, [target, source]() mutable { target.copy_(source); },
      load(Engine::kKernels, to.nbytes() + from.nbytes()));
}

void copy_to_device(const Tensor& to, const Tensor& from, Host then) {
  const void* host = from.const_data_ptr();
  if (are_bytes_alike(to, from) && is_pinned(host)) {
    copy_pinned(DeviceMemory::instance().reachable(to.const_data_ptr()), host, from.nbytes(), host, then,
        Engine::kCopiesIn);
    return;
  }
  count(Counter::kStagedCopies);
  auto target = reachable(to);
  auto staged = from.to(to.scalar_type()).clone(at::MemoryFormat::Contiguous);
  enqueue(current_stream(), Work::kCopy, [target, staged]() mutable { target.copy_(staged); }, load(Engine::kCopiesIn, to.nbytes()));
}

void copy_to_host(Tensor& to, const Tensor& from, Host then) {
  const void* host = to.const_data_ptr();
  if (are_bytes_alike(to, from) && is_pinned(host)) {
    const void* source = DeviceMemory::instance().reachable(from.const_data_ptr());
    copy_pinned(const_cast<void*>(host), source, from.nbytes(), host, then, Engine::kCopiesOut);
    return;
  }
  count(Counter::kBlockingCopies);
  auto source = reachable(from);
  auto staged = at::empty(from.sizes(), source.options());
  enqueue(
      current_stream(), Work::kCopy, [source, staged]() mutable { staged.copy_(source); },
      load(Engine::kCopiesOut, from.nbytes(), /*is_needed=*/true));
  synchronize(current_stream());
  to.copy_(staged);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0 || to.is_same(from)) {
    return to;
  }
  const Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  const Host then = non_blocking ? Host::kGoesOn : Host::kWaits;
  if (is_on_device(to) && is_on_device(source)) {
    copy_within_device(to, source);
  } else if (is_on_device(to)) {
    copy_to_device(to, source, then);
  } else {
    copy_to_host(to, source, then);
  }
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  Tensor target = to;
  target.resize_(from.sizes());
  return copy_(target, from, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  auto source = reachable(tensor);
  auto scalar = std::make_shared<at::Scalar>();
  enqueue(current_stream(), Work::kKernel, [source, scalar] { *scalar = source.item(); });
  synchronize(current_stream());
  return *scalar;
}

// ------------------------------------------------------------------ others

void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator().recordStream(tensor.storage().data_ptr(), stream);
}

// As CUDA's: a mask of chance and a product, so that random numbers are the device's.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  const auto mask_options = input.options().dtype(at::kBool);
  if (input.numel() == 0) {
    return {input, at::empty_like(input, mask_options)};
  }
  if (train.has_value() && !*train) {
    return {input.clone(), at::ones_like(input, mask_options)};
  }
  const double kept = 1 - p;
  auto mask = at::empty_like(input, mask_options);
  mask.bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0 : 1 / kept), mask};
}

// Attention is one operator as on a GPU, the CPU's, where it has that; else it is composed of others.
Tensor attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool is_grouped) {
  const bool is_fused = !mask.has_value() && dropout == 0 && !is_grouped && query.dim() == 4 && query.numel() > 0 &&
      key.sizes() == value.sizes() && at::isFloatingType(query.scalar_type());
  if (is_fused) {
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, std::nullopt, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout, is_causal, std::nullopt, scale, is_grouped));
}

// A tensor of the CPU may get the data of one of the device, and the reverse, as with CUDA.
bool has_compatible_shallow_copy_type(const Tensor& to, const Tensor& from) {
  const auto is_dense = [](const Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || is_on_device(tensor));
  };
  return is_dense(to) && is_dense(from);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", set_from_storage);
  library.impl("set_.source_Storage_storage_offset", set_from_storage_at);
  library.impl("set_", set_to_nothing);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("scaled_dot_product_attention", attention);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("scaled_dot_product_attention", attention);
  library.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}

}  // namespace
}  // namespace openreg
