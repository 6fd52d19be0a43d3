// Whether operators check what tensors hold, such as lengths and numbers of pages: on a GPU that
// means to wait for it.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// Whether CUDNN_OPS_CHECK asks for the checks that have to wait for the GPU.
bool checks_values();
// Whether what a tensor holds is checked: on a CPU always.
bool checks_values(const at::Tensor& tensor);

}  // namespace cudnn_ops
