// Rotary position embedding, and the rotation back, by one kernel (rotary.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// On the current device and stream. `input`: [B, H, S, D], `cos` and `sin`: [B or 1, S, D], with
// any strides; `out`: contiguous [B, S, H, D]. None of them is empty.
void rotate(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, bool is_backward,
            const at::Tensor& out);

}  // namespace cudnn_ops
