// Gated activations, act(gate) * up: what their files share. See cudnn_ops/ops/gated.py for the
// formulas.
#pragma once

#include "kernels/gated.h"
#include "ops/operator.h"

namespace cudnn_ops {

// In the order of the schema of cudnn_ops::_gated.
struct Gated {
  at::Tensor gate, up;
  int64_t activation = 0;  // a GatedActivation
  CUDNN_OPS_FIELDS(gate, up, activation)
};

struct GatedBackward {
  at::Tensor grad_out;
  Gated forward;
  CUDNN_OPS_FIELDS(grad_out, forward)
};

using GatedGradients = std::tuple<at::Tensor, at::Tensor>;  // of gate and up

// The public operators.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up, std::string_view approximate);

void check_gated(const Gated& args);
void check_gated_backward(const GatedBackward& args);

}  // namespace cudnn_ops
