// Batch norms in evaluation, folded into the weights and biases of the convolutions before them, by
// one kernel for many (batch_norm_fold.cu).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace cudnn_ops {

// One of them. All tensors are of one dtype, float16, bfloat16 or float32, and lie densely: the
// weights as [outputs, inputs, ...] or with the inputs last, `out_weight` likewise, and the others,
// [outputs], contiguous. What is undefined is not there.
struct BatchNormToFold {
  at::Tensor weight, bias, mean, var, norm_weight, norm_bias;
  double eps;
  at::Tensor out_weight, out_bias;
};

// Writes `out_weight` and `out_bias` of each; all have one dtype. On the current device and stream.
void fold_batch_norms(c10::ArrayRef<BatchNormToFold> norms);

}  // namespace cudnn_ops
