// Sparse tensors from the host to the device and back.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

// A copy of a tensor, sparse or not, on another device; a tensor that is there is itself.
at::Tensor moved(const at::Tensor& tensor, at::Device device);

}  // namespace openreg
