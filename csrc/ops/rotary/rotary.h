// Rotary position embedding: what its files share. See cudnn_ops/ops/rotary.py for the formula.
#pragma once

#include "ops/operator.h"

namespace cudnn_ops {

struct Rotary {
  at::Tensor input, cos, sin;
  bool is_backward = false;  // the gradient of the input, from that of the output
  CUDNN_OPS_FIELDS(input, cos, sin, is_backward)
};

void check_rotary(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace cudnn_ops
