// What of batch norm is computed by kernels of our own (batch_norm.cu).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

namespace cudnn_ops {

// What a call is given; all on one device, and the input not empty. Tensors of the input's shape
// lie densely in one memory order; those with a number for each channel are contiguous, and of the
// input's dtype or float32.
struct BatchNormOfImages {
  const at::Tensor& input;
  at::Tensor mean, spread;   // mean: undefined stands for 0
  bool is_variance = false;  // `spread`; else it is 1 / deviation
  double eps = 0;            // added to a variance
  std::optional<at::Tensor> weight = std::nullopt, bias = std::nullopt;
  at::Tensor residual = {};  // undefined: none
  bool has_relu = false, is_channels_last = false;
};

// Writes act((input - mean) / deviation * weight + bias + residual) to `out`. On the current device
// and stream, as the next.
void batch_norm_apply(const BatchNormOfImages& args, const at::Tensor& out);

// Writes the sums over samples and positions of `grad`, and of `grad * (input - mean)`, to `sums`,
// float32 [2, C], in a fixed order. Both are [N, C, ...], contiguous and of one dtype, and `mean`
// is float32 [C]. Torch's kernel for this rounds sums in between to the images' dtype (pytorch
// 195701), and has one block for a channel.
void batch_norm_sums(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                     const at::Tensor& sums);

// A number for each channel into memory of another dtype, contiguous both: float32, or float16 or
// bfloat16, of which a call has one alone.
struct BatchNormCopy {
  at::Tensor from;  // undefined: `otherwise`
  at::Tensor to;
  float otherwise = 0;
};

// Makes up to four copies, of as many channels each, in one launch.
void batch_norm_copy(c10::ArrayRef<BatchNormCopy> copies);

}  // namespace cudnn_ops
