// Tensors of the device as the streams' threads see them.
#pragma once

#include <ATen/core/Tensor.h>

namespace openreg {

bool is_on_device(const at::Tensor& tensor);

// A CPU tensor over the bytes of a device tensor, for work that is queued on a stream.  It keeps nothing alive:
// memory whose tensor is gone is protected by its stream's order alone, as on a GPU.
at::Tensor reachable(const at::Tensor& tensor);

}  // namespace openreg
