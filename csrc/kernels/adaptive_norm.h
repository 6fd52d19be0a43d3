// Adaptive norms by kernels of our own (adaptive_norm_forward.cu, adaptive_norm_backward.cu): layer
// norm and RMS norm whose results are multiplied and shifted by numbers of the row's sample, with a
// gated sum before them.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// What a call is given; all on one device, and the input not empty. Tensors that are not defined
// are absent.
struct AdaptiveNormOfRows {
  const char* op;           // begins messages
  const at::Tensor& input;  // [..., columns]
  at::Tensor update, gate;  // the norm is of input + gate * update
  at::Tensor scale, shift;  // as gate: broadcast over some of the input's dimensions but the last,
                            // or [samples, columns]; of the input's dtype or float32
  at::Tensor weight, bias;  // [columns], likewise
  double eps;
  bool is_layer;
};

// Writes `out`, and each of the others that is defined: the sum, and what the backward needs of
// each row. On the current device and stream, as the next.
void adaptive_norm_forward(const AdaptiveNormOfRows& args, const at::Tensor& out,
                           const at::Tensor& sum, const at::Tensor& mean, const at::Tensor& rstd);

// What the backward writes where it is defined, dense, and each of its tensor's shape.
struct AdaptiveNormGradientsOut {
  at::Tensor input, update, gate, scale, shift, weight, bias;
};

// `args.input` is the sum, where there was one. `grad_sum`, where defined, is added to its
// gradient.
void adaptive_norm_backward(const AdaptiveNormOfRows& args, const at::Tensor& grad_out,
                            const at::Tensor& grad_sum, const at::Tensor& mean,
                            const at::Tensor& rstd, const AdaptiveNormGradientsOut& grads);

}  // namespace cudnn_ops
