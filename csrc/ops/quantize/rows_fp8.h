// Rows, normed or gated, rounded to 8 bits: what its files share. See cudnn_ops/ops/rows_fp8.py for
// the formulas.
#pragma once

#include "ops/operator.h"

namespace cudnn_ops {

// cudnn_ops::_rows_fp8.
struct RowsFp8 {
  at::Tensor input;
  OptionalTensor other;   // a residual; with an activation what it is multiplied with
  OptionalTensor weight;  // of the norm
  OptionalTensor scale;   // float32, one number; none: each row has its own
  int64_t kind = 0;       // a RowsFp8Kind (kernels/rows_fp8_call.h)
  double eps = 0;
  bool zero_centered = false;
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  CUDNN_OPS_FIELDS(input, other, weight, scale, kind, eps, zero_centered, dtype)

  bool is_norm() const {
    return kind == 1;
  }
  bool is_gated() const {
    return kind > 1;
  }
  const char* name() const {
    return is_gated()   ? "cudnn_ops.swiglu_fp8"
           : !is_norm() ? "cudnn_ops.quantize_rows_fp8"
           : other      ? "cudnn_ops.add_rms_norm_fp8"
                        : "cudnn_ops.rms_norm_fp8";
  }
};

// The rounded rows, their descales and largest magnitudes, and the sum, [0] without a residual.
using RowsFp8Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

void check_rows_fp8(const RowsFp8& args);

}  // namespace cudnn_ops
