// Adaptive layer norm and RMS norm on CUDA.

#include "ops/adaptive_norm/adaptive_norm.h"
#include "ops/or_none_cuda.h"

#include "kernels/adaptive_norm.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_cuda_dtype(const AdaptiveNorm& args) {
  TORCH_CHECK_TYPE(args.input.scalar_type() != at::kDouble, name_of(args),
                   ": input must be float16, bfloat16 or float32 on a GPU; got ",
                   args.input.scalar_type());
}

AdaptiveNormOfRows rows_of(const AdaptiveNorm& args) {
  const auto or_undefined = [](const OptionalTensor& tensor) {
    return tensor.value_or(at::Tensor());
  };
  return {name_of(args),
          args.input,
          or_undefined(args.update),
          or_undefined(args.gate),
          or_undefined(args.scale),
          or_undefined(args.shift),
          or_undefined(args.weight),
          or_undefined(args.bias),
          args.eps,
          args.is_layer};
}

AdaptiveNormResults adaptive_norm_cuda(const AdaptiveNormForward& forward) {
  const auto& [args, with_stats] = forward;
  const auto& input = args.input;
  check_adaptive_norm(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  check_cuda_dtype(args);
  const auto dtype = input.scalar_type();
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType type) {
    return at::detail::empty_cuda(sizes, type, input.device(), std::nullopt);
  };
  const at::Tensor out = empty(input.sizes(), dtype);
  at::Tensor sum, mean, rstd;
  if (args.update) sum = empty(input.sizes(), dtype);
  const auto rows = input.sizes().slice(0, input.sizes().size() - 1);
  if (with_stats && args.is_layer) mean = empty(rows, at::kFloat);
  if (with_stats) rstd = empty(rows, at::kFloat);
  if (input.numel() > 0) adaptive_norm_forward(rows_of(args), out, sum, mean, rstd);
  return {out, or_none(sum, input, dtype), or_none(mean, input, at::kFloat),
          or_none(rstd, input, at::kFloat)};
}

AdaptiveNormGradients adaptive_norm_backward_cuda(const AdaptiveNormBackward& backward) {
  const auto& [grad_out, grad_sum, saved, output_mask] = backward;
  const auto& input = saved.input;
  const AdaptiveNorm args = saved.norm();
  check_adaptive_norm_backward(backward);
  check_cuda_dtype(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const AdaptiveNormOfRows rows = rows_of(args);
  bool is_any_wanted = false;
  const auto like = [&](const at::Tensor& tensor, bool is_wanted) {
    if (!is_wanted) return at::Tensor();
    is_any_wanted = true;
    at::Tensor grad =
        at::detail::empty_cuda(tensor.sizes(), tensor.scalar_type(), input.device(), std::nullopt);
    if (input.numel() == 0) grad.zero_();
    return grad;
  };
  const AdaptiveNormGradientsOut grads{
      like(input, output_mask[0]),      like(rows.update, output_mask[1]),
      like(rows.gate, output_mask[2]),  like(rows.scale, output_mask[3]),
      like(rows.shift, output_mask[4]), like(rows.weight, output_mask[5]),
      like(rows.bias, output_mask[6])};
  if (is_any_wanted && input.numel() > 0) {
    adaptive_norm_backward(rows, grad_out, grad_sum.value_or(at::Tensor()), saved.mean, saved.rstd,
                           grads);
  }
  const auto or_empty = [&](const at::Tensor& grad) { return or_none(grad, input, at::kFloat); };
  return {or_empty(grads.input), or_empty(grads.update), or_empty(grads.gate),
          or_empty(grads.scale), or_empty(grads.shift),  or_empty(grads.weight),
          or_empty(grads.bias)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_adaptive_norm", cudnn_ops::kernel<cudnn_ops::adaptive_norm_cuda>);
  m.impl("_adaptive_norm_backward", cudnn_ops::kernel<cudnn_ops::adaptive_norm_backward_cuda>);
}
