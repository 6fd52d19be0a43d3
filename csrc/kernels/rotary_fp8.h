// Norm, rotation and rounding to 8 bits of query, key and value (rotary_fp8.cu).
#pragma once

#include "kernels/rotary.h"

#include <optional>

namespace cudnn_ops {

struct RotaryFp8Input {
  // [B, heads, S, size] of at most 256 numbers.
  const at::Tensor &query, &key, &value;
  const std::optional<at::Tensor>&query_weight, &key_weight;  // [size], of one dtype
  const std::optional<at::Tensor>& scales;
  double eps;
  bool zero_centered;
};

// Results: those of the sizes of the inputs, in memory [B, S, heads, size]; descale and amax
// float32: query, key, and one number for value or one for each head of it.
struct RotaryFp8Output {
  const at::Tensor &query, &key, &value, &descale, &amax;
};

// On the current device and stream.
void rotate_to_fp8(const RotaryFp8Input& input, const RotaryTurn& turn,
                   const RotaryFp8Output& output);

}  // namespace cudnn_ops
