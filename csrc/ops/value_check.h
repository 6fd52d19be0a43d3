// What tensors hold is checked where it is known without waiting for a GPU, or where someone asks.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// Whether CUDNN_OPS_CHECK asks for the checks that have to wait for the GPU.
bool checks_values();
// Whether what a tensor holds is checked: on a CPU always.
bool checks_values(const at::Tensor& tensor);

}  // namespace cudnn_ops
