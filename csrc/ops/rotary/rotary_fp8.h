// Norm, rotation and rounding to 8 bits of query, key and value: what its files share. See
// cudnn_ops/ops/rotary_fp8.py for the formulas.
#pragma once

#include "ops/rotary/rotary.h"

namespace cudnn_ops {

// cudnn_ops::_rotary_fp8.
struct RotaryFp8 {
  at::Tensor query, key, value;
  RotaryAngles angles;
  OptionalTensor scales;                    // float32, as many as RotaryFp8::scale_count()
  OptionalTensor query_weight, key_weight;  // of RMS norms of the heads; none: no norm
  double eps = 0;
  bool zero_centered = false;
  bool per_head = false;  // whether each head of the value has a scale
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  CUDNN_OPS_FIELDS(query, key, value, angles, scales, query_weight, key_weight, eps, zero_centered,
                   per_head, dtype)

  // Those of query, key and value, or of each head of the value.
  c10::SymInt scale_count() const {
    return 2 + (per_head ? value.sym_size(1) : c10::SymInt(1));
  }
};

// The rounded tensors, their descales and their largest magnitudes.
using RotaryFp8Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_rotary_fp8(const RotaryFp8& args);

}  // namespace cudnn_ops
