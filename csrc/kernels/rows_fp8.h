// Rows, normed or gated, rounded to 8 bits (rows_fp8.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// What is rounded, of an input that is not empty: its last dimension is the row. `kind`: a
// RowsFp8Kind; `other`: the residual of a norm, or what an activation is multiplied with.
struct RowsOfFp8 {
  const char* op;  // begins messages
  const at::Tensor& input;
  const std::optional<at::Tensor>&other, &weight, &scale;
  int64_t kind;
  double eps;
  bool zero_centered;
};

// Writes all: `sum` where there is a residual; `descale` and `amax`, float32 of each row, or of all
// where a scale is given. On the current device and stream.
void round_rows_to_fp8(const RowsOfFp8& args, const at::Tensor& out, const at::Tensor& sum,
                       const at::Tensor& descale, const at::Tensor& amax);

}  // namespace cudnn_ops
