// Rounding to 8 bits and back, for the families whose operators are made of them too. See
// cudnn_ops/ops/quantize.py for the formulas.
#pragma once

#include "ops/operator.h"

namespace cudnn_ops {

struct Quantize {
  at::Tensor input;
  OptionalTensor scale;        // float32, one number or one for each index of `dim`
  std::optional<int64_t> dim;  // not negative
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  bool power_of_two = false;  // whether a scale that is not given is one
  CUDNN_OPS_FIELDS(input, scale, dim, dtype, power_of_two)
};

struct Dequantize {
  at::Tensor input, descale;
  std::optional<int64_t> dim;
  at::ScalarType dtype = at::kBFloat16;
  CUDNN_OPS_FIELDS(input, descale, dim, dtype)
};

// The rounded tensor, its descales and its largest magnitudes.
using Quantized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

const Operator<Quantized, Quantize>& quantize_op();
const Operator<at::Tensor, Dequantize>& dequantize_op();

}  // namespace cudnn_ops
