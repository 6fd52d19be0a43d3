// Group norm on CUDA.

#include "ops/group_norm/group_norm.h"
#include "ops/image_order_cuda.h"
#include "ops/or_none_cuda.h"

#include "kernels/group_norm.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_cuda_dtype(const GroupNorm& args) {
  TORCH_CHECK_TYPE(args.input.scalar_type() != at::kDouble, name_of(args),
                   ": input must be float16, bfloat16 or float32 on a GPU; got ",
                   args.input.scalar_type());
}

GroupNormResults group_norm_cuda(const GroupNormForward& forward) {
  const auto& [args, with_stats] = forward;
  const auto& input = args.input;
  check_group_norm(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  check_cuda_dtype(args);
  const bool is_last = is_image_channels_last(input);
  const auto dtype = input.scalar_type();
  const auto device = input.device();
  const at::Tensor out = empty_in_order(input.sizes(), dtype, device, is_last);
  at::Tensor sum, mean, rstd;
  if (args.residual) sum = empty_in_order(input.sizes(), dtype, device, is_last);
  const int64_t stats[2] = {input.size(0), args.num_groups};
  if (with_stats) mean = at::detail::empty_cuda(stats, at::kFloat, device, std::nullopt);
  if (with_stats) rstd = at::detail::empty_cuda(stats, at::kFloat, device, std::nullopt);
  if (input.numel() > 0) {
    const at::Tensor x = in_order(input, is_last);
    group_norm_forward({name_of(args), x, args.weight, args.bias, args.num_groups, args.eps,
                        args.has_silu(), is_last},
                       in_order(args.residual, is_last), out, sum, mean, rstd);
  }
  return {out, or_none(sum, input, dtype), or_none(mean, input, at::kFloat),
          or_none(rstd, input, at::kFloat)};
}

GroupNormGradients group_norm_backward_cuda(const GroupNormBackward& backward) {
  const auto& [grad_out, grad_sum, saved, output_mask] = backward;
  const auto& input = saved.input;
  const GroupNorm args = saved.norm();
  check_group_norm_backward(backward);
  check_cuda_dtype(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const bool is_last = is_image_channels_last(input);
  const auto like = [&](const at::Tensor& parameter) {
    return at::detail::empty_cuda(parameter.sizes(), parameter.scalar_type(), input.device(),
                                  std::nullopt);
  };
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    grad_input = empty_in_order(input.sizes(), input.scalar_type(), input.device(), is_last);
  }
  if (output_mask[1]) grad_weight = like(*args.weight);
  if (output_mask[2]) grad_bias = like(*args.bias);
  if (input.numel() == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
  } else if (output_mask[0] || output_mask[1] || output_mask[2]) {
    const at::Tensor x = in_order(input, is_last);
    group_norm_backward({name_of(args), x, args.weight, args.bias, args.num_groups, /*eps=*/0,
                         args.has_silu(), is_last},
                        in_order(grad_out, is_last), in_order(grad_sum, is_last), saved.mean,
                        saved.rstd, grad_input, grad_weight, grad_bias);
  }
  return {or_none(grad_input, input, at::kFloat), or_none(grad_weight, input, at::kFloat),
          or_none(grad_bias, input, at::kFloat)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_group_norm", cudnn_ops::kernel<cudnn_ops::group_norm_cuda>);
  m.impl("_group_norm_backward", cudnn_ops::kernel<cudnn_ops::group_norm_backward_cuda>);
}
