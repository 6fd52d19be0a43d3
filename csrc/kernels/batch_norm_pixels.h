// Batch norm in training of images with their channels last, by kernels of our own
// (batch_norm_pixels.cu).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace cudnn_ops {

// Of so many bytes the numbers of a pixel are a multiple; a call's images begin at one.
inline constexpr int64_t kPixelBytes = 16;

// Images lie densely with their channels last, or have one position; none is empty. Tensors with a
// number for each channel are contiguous, and of the images' dtype or float32. All are on the
// current device, and the kernels run on the current stream.

struct BatchNormStats {
  const at::Tensor& input;
  std::optional<at::Tensor> running_mean, running_var;  // changed in place
  double momentum = 0, eps = 0;
};

// Writes mean and 1 / deviation of each channel, float32.
void batch_norm_find_stats(const BatchNormStats& args, const at::Tensor& mean,
                           const at::Tensor& rstd);

struct BatchNormSlope {
  const at::Tensor &grad_out, &input, &mean, &rstd;
  std::optional<at::Tensor> weight = std::nullopt, bias = std::nullopt;
  bool has_relu = false;
  // Of the ReLU; absent: batch_norm_apply gave it, of these numbers alone.
  std::optional<at::Tensor> out = std::nullopt;
  // Results; undefined: not wanted.
  at::Tensor grad_input = {}, grad_weight = {}, grad_bias = {};
  at::Tensor masked = {};  // what came through the ReLU, where there is `out`
  // Added to `grad_out`; only where `masked`, which is then of both, is wanted.
  std::optional<at::Tensor> grad_more = std::nullopt;
};

void batch_norm_find_gradients(const BatchNormSlope& args);

}  // namespace cudnn_ops
