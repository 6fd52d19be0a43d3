// What FP8 attention has on CUDA, dense and packed.
#pragma once

#include "ops/backward_check.h"

namespace cudnn_ops {

// The probabilities, of which none is above 1, are rounded to 8 bits too. As much of the range as a
// power of two allows keeps the small ones out of the numbers that are not normal.
constexpr float kFp8ScaleOfProbabilities = 256;

// A tensor of 8 bits as integers, which torch can fill and copy; others as they are.
inline at::Tensor bytes_of_fp8(const at::Tensor& tensor) {
  return is_fp8(tensor.scalar_type()) ? tensor.view(at::kByte) : tensor;
}

}  // namespace cudnn_ops
