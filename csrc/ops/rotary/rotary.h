// Rotary position embedding: what its files share. See cudnn_ops/ops/rotary.py for the formula.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace cudnn_ops {

void check_rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin);

// `is_backward`: the gradient of the input, from that of the output.
using RotaryOp = at::Tensor(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin,
                            bool is_backward);
const c10::TypedOperatorHandle<RotaryOp>& rotary_op();

}  // namespace cudnn_ops
