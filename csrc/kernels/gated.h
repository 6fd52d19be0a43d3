// Gated activations, act(gate) * up, and their gradients, each by one kernel (gated.cu).
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

enum class GatedActivation : int64_t { kSilu, kGelu, kGeluTanh };

// On the current device and stream, as the next. `gate` and `up` may have any strides; `out` is
// contiguous, and may be either of them.
void gated_forward(const at::Tensor& gate, const at::Tensor& up, GatedActivation activation,
                   const at::Tensor& out);

// Likewise: the rows of `grad_gate` and `grad_up` lie densely, and as far from each other in both.
void gated_backward(const at::Tensor& grad_out, const at::Tensor& gate, const at::Tensor& up,
                    GatedActivation activation, const at::Tensor& grad_gate,
                    const at::Tensor& grad_up);

}  // namespace cudnn_ops
