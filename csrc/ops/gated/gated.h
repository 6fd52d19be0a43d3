// Gated activations, act(gate) * up: what their files share. See cudnn_ops/ops/gated.py for the
// formulas.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <tuple>

namespace cudnn_ops {

enum class Activation : int64_t { kSilu, kGelu, kGeluTanh };

using GatedGradients = std::tuple<at::Tensor, at::Tensor>;  // of gate and up

void check_gated(const at::Tensor& gate, const at::Tensor& up, int64_t activation);
void check_gated_backward(const at::Tensor& grad_out, const at::Tensor& gate, const at::Tensor& up,
                          int64_t activation);

const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>&
gated_op();
const c10::TypedOperatorHandle<GatedGradients(const at::Tensor&, const at::Tensor&,
                                              const at::Tensor&, int64_t)>&
gated_backward_op();

}  // namespace cudnn_ops
