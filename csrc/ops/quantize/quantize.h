// Rounding to 8 bits and back: what its files share. See cudnn_ops/ops/quantize.py for the
// formulas.
#pragma once

#include "ops/operator.h"

namespace cudnn_ops {

struct Quantize {
  at::Tensor input;
  OptionalTensor scale;        // float32, one number or one for each index of `dim`
  std::optional<int64_t> dim;  // not negative
  at::ScalarType dtype = at::kFloat8_e4m3fn;
  CUDNN_OPS_FIELDS(input, scale, dim, dtype)
};

struct Dequantize {
  at::Tensor input, descale;
  std::optional<int64_t> dim;
  at::ScalarType dtype = at::kBFloat16;
  CUDNN_OPS_FIELDS(input, descale, dim, dtype)
};

// The rounded tensor, its descales and its largest magnitudes.
using Quantized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_quantize(const Quantize& args);
void check_dequantize(const Dequantize& args);

}  // namespace cudnn_ops
