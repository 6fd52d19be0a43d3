// Batch norm on CUDA: by a plan of cuDNN where there may be one (batch_norm_problem.cpp), else by
// torch's kernels for the sums over pixels and one of ours for everything else of the forward.

#include "ops/batch_norm/batch_norm_plans.h"
#include "ops/image_order_cuda.h"
#include "ops/only_kernels.h"
#include "ops/or_none_cuda.h"

#include "graph/cuda_call.h"
#include "kernels/batch_norm.h"
#include "kernels/conv_epilogue.h"

#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_cuda_dtype(const at::Tensor& input) {
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble, kBatchNorm,
                   ": input must be float16, bfloat16 or float32 on a GPU; got ",
                   input.scalar_type());
}

at::Tensor empty_vector(const at::Tensor& input) {
  return at::detail::empty_cuda({input.size(1)}, at::kFloat, input.device(), std::nullopt);
}

at::Tensor zero_vector(const at::Tensor& input) {
  return empty_vector(input).zero_();
}

OptionalTensor contiguous(const OptionalTensor& vector) {
  return vector ? OptionalTensor(vector->contiguous()) : std::nullopt;
}

// The call with its images in the order of the results.
BatchNorm laid_out(const BatchNorm& given, bool is_last) {
  BatchNorm args = given;
  args.input = in_order(given.input, is_last);
  if (given.residual) args.residual = in_order(*given.residual, is_last);
  return args;
}

// By known statistics.
void apply(const BatchNorm& args, const at::Tensor& mean, const at::Tensor& var, bool is_last,
           const at::Tensor& out) {
  BatchNormOfImages call{args.input, mean.contiguous(), var.contiguous(), /*is_variance=*/true};
  call.eps = args.eps;
  call.weight = contiguous(args.weight);
  call.bias = contiguous(args.bias);
  call.residual = args.residual.value_or(at::Tensor());
  call.has_relu = args.has_relu();
  call.is_channels_last = is_last;
  batch_norm_apply(call, out);
}

BatchNormResults batch_norm_training_cuda(const BatchNorm& given) {
  check_batch_norm({given, /*training=*/true});
  const auto& input = given.input;
  check_cuda_dtype(input);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(kBatchNorm, input.get_device());
  const OnlyKernels only_kernels;
  const bool is_last = is_image_channels_last(input);
  const at::Tensor out =
      empty_in_order(input.sizes(), input.scalar_type(), input.device(), is_last);
  if (input.numel() == 0) return {out, zero_vector(input), zero_vector(input)};
  const BatchNorm args = laid_out(given, is_last);
  if (reason_without_plan(given, /*training=*/true).empty()) {
    const at::Tensor mean = empty_vector(input), rstd = empty_vector(input);
    if (run_batch_norm_plan(args, out, mean, rstd)) return {out, mean, rstd};
  }
  const auto [mean, var] =
      at::batch_norm_update_stats(args.input, args.running_mean, args.running_var, args.momentum);
  apply(args, mean, var, is_last, out);
  return {out, mean, at::add(var, args.eps).rsqrt_()};
}

at::Tensor batch_norm_inference_cuda(const BatchNorm& given) {
  check_batch_norm({given, /*training=*/false});
  const auto& input = given.input;
  check_cuda_dtype(input);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const bool is_last = is_image_channels_last(input);
  const at::Tensor out =
      empty_in_order(input.sizes(), input.scalar_type(), input.device(), is_last);
  if (input.numel() > 0) {
    apply(laid_out(given, is_last), *given.running_mean, *given.running_var, is_last, out);
  }
  return out;
}

// What the backward is asked for, and what it computes it from, in one order of memory.
struct Gradients {
  at::Tensor input, weight, bias, residual;
};

// Through the ReLU; its sums are nobody's business here, so any dense order will do.
at::Tensor through_relu(const at::Tensor& grad_out, const at::Tensor& out,
                        const at::Tensor& wanted) {
  const at::Tensor grad = wanted.defined() ? wanted : at::empty_like(grad_out);
  conv_epilogue_backward(grad_out, out, Activation::kRelu, grad, /*grad_bias=*/{});
  return grad;
}

// What the derivative adds up over each channel: `grad`, and `grad * (input - mean)`.
std::tuple<at::Tensor, at::Tensor> sums_of(const BatchNormSaved& saved, const at::Tensor& grad,
                                           bool is_last, const OptionalTensor& weight) {
  const auto& input = saved.input;
  const int64_t channels = input.size(1);
  // Of one position both orders are the same.
  if (is_last || input.numel() == input.size(0) * channels) {
    const auto found =
        at::batch_norm_backward_reduce(grad, input, saved.mean, saved.rstd, weight,
                                       /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
    return {std::get<0>(found), std::get<1>(found)};
  }
  const at::Tensor sums =
      at::detail::empty_cuda({2, channels}, at::kFloat, input.device(), std::nullopt);
  batch_norm_sums(grad, input, saved.mean, sums);
  return {sums.select(0, 0), sums.select(0, 1)};
}

// By torch's kernels but for some of the sums, from the gradient of the norm's own result.
void backward_by_kernels(const BatchNormSaved& saved, const at::Tensor& grad, bool is_last,
                         Gradients& wanted) {
  const OptionalTensor weight =
      saved.weight ? OptionalTensor(saved.weight->to(at::kFloat).contiguous()) : std::nullopt;
  const bool has_sums = saved.training || wanted.weight.defined() || wanted.bias.defined();
  at::Tensor sum, sum_of_products;
  if (has_sums) {
    std::tie(sum, sum_of_products) = sums_of(saved, grad, is_last, weight);
    if (wanted.weight.defined()) at::mul_out(wanted.weight, sum_of_products, saved.rstd);
    if (wanted.bias.defined()) wanted.bias.copy_(sum);
  }
  if (!wanted.input.defined()) return;
  if (saved.training) {
    const int64_t numbers = saved.input.numel() / saved.input.size(1);
    const at::Tensor count = at::full({1}, numbers, saved.input.options().dtype(at::kInt));
    wanted.input.copy_(at::batch_norm_backward_elemt(grad, saved.input, saved.mean, saved.rstd,
                                                     weight, sum, sum_of_products, count));
    return;
  }
  BatchNormOfImages call{grad, /*mean=*/{}, saved.rstd};
  call.weight = weight;
  call.is_channels_last = is_last;
  batch_norm_apply(call, wanted.input);
}

// By a plan, which computes all of the norm's gradients.
bool backward_by_plan(const BatchNormSaved& saved, const at::Tensor& grad,
                      const OptionalTensor& out, const Gradients& wanted) {
  BatchNormWritten written{wanted.input, wanted.weight, wanted.bias,
                           out ? wanted.residual : at::Tensor()};
  if (!written.grad_input.defined()) written.grad_input = at::empty_like(saved.input);
  if (!written.grad_weight.defined()) written.grad_weight = empty_vector(saved.input);
  if (!written.grad_bias.defined()) written.grad_bias = empty_vector(saved.input);
  return run_batch_norm_backward_plan(saved, grad, out, written);
}

void batch_norm_gradients_cuda(const BatchNormSaved& saved, const at::Tensor& grad_out,
                               bool is_last, Gradients& wanted) {
  const bool is_of_norm =
      wanted.input.defined() || wanted.weight.defined() || wanted.bias.defined();
  const bool has_plan = is_of_norm && reason_without_plan(saved.input, saved.training).empty();
  if (has_plan && saved.has_relu() && takes_mask(saved.input) &&
      backward_by_plan(saved, grad_out, saved.out, wanted)) {
    return;
  }
  at::Tensor grad = grad_out;
  if (saved.has_relu()) {
    grad = through_relu(grad_out, *saved.out, wanted.residual);
  } else if (wanted.residual.defined()) {
    wanted.residual.copy_(grad_out);
  }
  if (!is_of_norm || (has_plan && backward_by_plan(saved, grad, /*out=*/{}, wanted))) return;
  backward_by_kernels(saved, grad, is_last, wanted);
}

// The gradients of weight and bias in the dtype that these have, by one launch.
void cast_vectors(Gradients& wanted, at::ScalarType dtype) {
  if (dtype == at::kFloat) return;
  c10::SmallVector<BatchNormCopy, 2> copies;
  for (auto* vector : {&wanted.weight, &wanted.bias}) {
    if (!vector->defined()) continue;
    const at::Tensor cast =
        at::detail::empty_cuda(vector->sizes(), dtype, vector->device(), std::nullopt);
    copies.push_back({*vector, cast});
    *vector = cast;
  }
  if (!copies.empty()) batch_norm_copy(copies);
}

BatchNormGradients batch_norm_backward_cuda(const BatchNormBackward& backward) {
  const auto& [grad_out, given, output_mask, params_in_input_dtype] = backward;
  const auto& input = given.input;
  check_batch_norm_backward(backward);
  check_cuda_dtype(input);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const OnlyKernels only_kernels;
  const bool is_last = is_image_channels_last(input);
  const auto empty_image = [&](bool is_wanted) {
    if (!is_wanted) return at::Tensor();
    return empty_in_order(input.sizes(), input.scalar_type(), input.device(), is_last);
  };
  const auto vector = [&](bool is_wanted) {
    if (!is_wanted) return at::Tensor();
    return input.numel() == 0 ? zero_vector(input) : empty_vector(input);
  };
  Gradients wanted{empty_image(output_mask[0]), vector(output_mask[1]), vector(output_mask[2]),
                   empty_image(output_mask[3])};
  if (input.numel() > 0) {
    BatchNormSaved saved = given;
    saved.input = in_order(input, is_last);
    if (given.out) saved.out = in_order(*given.out, is_last);
    batch_norm_gradients_cuda(saved, in_order(grad_out, is_last), is_last, wanted);
  }
  const auto dtype = input.scalar_type();
  if (params_in_input_dtype) cast_vectors(wanted, dtype);
  const auto of_params = params_in_input_dtype ? dtype : at::kFloat;
  return {or_none(wanted.input, input, dtype), or_none(wanted.weight, input, of_params),
          or_none(wanted.bias, input, of_params), or_none(wanted.residual, input, dtype)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("_batch_norm_training", kernel<batch_norm_training_cuda>);
  m.impl("_batch_norm_inference", kernel<batch_norm_inference_cuda>);
  m.impl("_batch_norm_backward", kernel<batch_norm_backward_cuda>);
}
