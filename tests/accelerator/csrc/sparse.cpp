// Sparse tensors: two dense ones of the device, the indices and the values, with PyTorch's own books.
//
// What computes with them is the CPU's kernel, in host memory, and the host waits for it: how many indices a result has
// depends on values, so other accelerators wait as well.

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <torch/library.h>

#include <vector>

#include "runtime.h"
#include "sparse.h"
#include "tensors.h"

namespace openreg {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

}  // namespace

Tensor moved(const Tensor& tensor, at::Device device) {
  if (!tensor.defined() || tensor.device().type() == device.type()) {
    return tensor;
  }
  if (!tensor.is_sparse()) {
    return tensor.to(device);
  }
  return at::_sparse_coo_tensor_unsafe(
      tensor._indices().to(device), tensor._values().to(device), tensor.sizes(), tensor.options().device(device),
      tensor.is_coalesced());
}

namespace {

IValue moved_value(const IValue& value, at::Device device) {
  if (value.isTensor()) {
    return moved(value.toTensor(), device);
  }
  if (value.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& each : value.toTensorVector()) {
      tensors.push_back(moved(each, device));
    }
    return tensors;
  }
  if (value.isDevice()) {
    return device;
  }
  return value;
}

// Lets `tensor`, of the device, be what was computed in its place.
void become(const Tensor& tensor, const Tensor& computed) {
  if (!tensor.is_sparse()) {
    tensor.copy_(computed);
    return;
  }
  auto* impl = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  const Tensor there = moved(computed, kDevice);
  if (there.sizes() != tensor.sizes() || there.sparse_dim() != tensor.sparse_dim()) {
    impl->resize_(there.sparse_dim(), there.dense_dim(), there.sizes());
  }
  impl->set_indices_and_values_unsafe(there._indices(), there._values());
  impl->set_coalesced(there.is_coalesced());
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowAutograd without_autograd;
  const auto& schema = op.schema();
  const std::vector<IValue> arguments = torch::jit::pop(*stack, schema.arguments().size());
  Stack values;
  for (const auto& argument : arguments) {
    values.push_back(moved_value(argument, at::Device(at::kCPU)));
  }
  const std::vector<IValue> given(values);
  op.callBoxed(values);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && is_on_device(arguments[i].toTensor())) {
      become(arguments[i].toTensor(), given[i].toTensor());
    }
  }
  for (const auto& value : values) {
    IValue result = value;
    for (size_t i = 0; value.isTensor() && i < arguments.size(); ++i) {
      if (given[i].isTensor() && given[i].toTensor().is_same(value.toTensor())) {
        result = arguments[i];
      }
    }
    const bool is_argument = value.isTensor() && !result.toTensor().is_same(value.toTensor());
    torch::jit::push(*stack, is_argument ? result : moved_value(value, kDevice));
  }
}

// To the host goes what is asked for there.
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  const Tensor there = moved(source, self.device());
  auto* impl = static_cast<at::SparseTensorImpl*>(self.unsafeGetTensorImpl());
  impl->resize_(there.sparse_dim(), there.dense_dim(), there.sizes());
  impl->set_indices_and_values_unsafe(there._indices().clone(), there._values().to(self.scalar_type(), false, true));
  impl->set_coalesced(there.is_coalesced());
  return self;
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(at::native::empty_sparse_symint));
  library.impl("_sparse_coo_tensor_with_dims", TORCH_FN(at::native::new_with_dims_sparse));
  library.impl(
      "_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  library.impl("_indices", TORCH_FN(at::native::_indices_sparse));
  library.impl("_values", TORCH_FN(at::native::_values_sparse));
  library.impl("indices", TORCH_FN(at::native::indices_sparse));
  library.impl("values", TORCH_FN(at::native::values_sparse));
  library.impl("_nnz", TORCH_FN(at::native::_nnz_sparse));
  library.impl("sparse_dim", TORCH_FN(at::native::sparse_dim_sparse));
  library.impl("dense_dim", TORCH_FN(at::native::dense_dim_sparse));
  library.impl("is_coalesced", TORCH_FN(at::native::is_coalesced_sparse));
  library.impl("_coalesced_", TORCH_FN(at::native::_coalesced_sparse_));
  library.impl("copy_", TORCH_FN(copy_));
}

}  // namespace
}  // namespace openreg
