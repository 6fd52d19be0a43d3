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

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.gate, self.up, self.activation);
  }
};

struct GatedBackward {
  at::Tensor grad_out;
  Gated forward;

  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(std::tie(self.grad_out), Gated::fields(self.forward));
  }
};

using GatedGradients = std::tuple<at::Tensor, at::Tensor>;  // of gate and up

void check_gated(const Gated& args);
void check_gated_backward(const GatedBackward& args);

}  // namespace cudnn_ops
