// Batch norm on CUDA: in training, images with their channels last by kernels of ours or, where
// that is faster, a plan of cuDNN (batch_norm_problem.cpp); others by torch's kernels for most of
// the sums and one of ours for everything else of the forward.

#include "ops/batch_norm/batch_norm_plans.h"
#include "ops/image_order_cuda.h"
#include "ops/only_kernels.h"
#include "ops/or_none_cuda.h"

#include "graph/cuda_call.h"
#include "kernels/batch_norm.h"
#include "kernels/batch_norm_pixels.h"
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

at::Tensor empty_vector(const at::Tensor& input, at::ScalarType dtype = at::kFloat) {
  return at::detail::empty_cuda({input.size(1)}, dtype, input.device(), std::nullopt);
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

// At an address that kernels load whole pieces from.
at::Tensor aligned(const at::Tensor& image, bool is_last) {
  return aligned_in_order(image, is_last, kPixelBytes);
}

// By known statistics.
void apply(const BatchNorm& args, const at::Tensor& mean, const at::Tensor& spread,
           bool is_variance, bool is_last, const at::Tensor& out) {
  BatchNormOfImages call{args.input, mean.contiguous(), spread.contiguous(), is_variance};
  call.eps = args.eps;
  call.weight = contiguous(args.weight);
  call.bias = contiguous(args.bias);
  call.residual = args.residual.value_or(at::Tensor());
  call.has_relu = args.has_relu();
  call.is_channels_last = is_last;
  batch_norm_apply(call, out);
}

// Mean and 1 / deviation of each channel; changes the running statistics.
std::tuple<at::Tensor, at::Tensor> statistics_of(const BatchNorm& args, bool is_last) {
  const at::Tensor image = aligned(args.input, is_last);
  const at::Tensor mean = empty_vector(image), rstd = empty_vector(image);
  const auto running_mean = contiguous(args.running_mean);
  const auto running_var = contiguous(args.running_var);
  batch_norm_find_stats({image, running_mean, running_var, args.momentum, args.eps}, mean, rstd);
  if (args.running_mean) {
    if (!running_mean->is_same(*args.running_mean)) args.running_mean->copy_(*running_mean);
    if (!running_var->is_same(*args.running_var)) args.running_var->copy_(*running_var);
  }
  return {mean, rstd};
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
  const bool has_more = args.has_relu() || args.residual;
  if (reason_without_plan(args.input, /*training=*/true, has_more).empty()) {
    const at::Tensor mean = empty_vector(input), rstd = empty_vector(input);
    if (run_batch_norm_plan(args, out, mean, rstd)) return {out, mean, rstd};
  }
  if (has_pixel_kernels(input)) {
    const auto [mean, rstd] = statistics_of(args, is_last);
    apply(args, mean, rstd, /*is_variance=*/false, is_last, out);
    return {out, mean, rstd};
  }
  const auto [mean, var] =
      at::batch_norm_update_stats(args.input, args.running_mean, args.running_var, args.momentum);
  apply(args, mean, var, /*is_variance=*/true, is_last, out);
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
    apply(laid_out(given, is_last), *given.running_mean, *given.running_var,
          /*is_variance=*/true, is_last, out);
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

// By a plan, which computes all of the norm's gradients, those of channels in float32.
bool backward_by_plan(const BatchNormSaved& saved, const at::Tensor& grad,
                      const Gradients& wanted) {
  const auto& [image, weight, bias, residual] = wanted;
  const auto in_float = [&saved](const at::Tensor& vector) {
    const bool is_there = vector.defined() && vector.scalar_type() == at::kFloat;
    return is_there ? vector : empty_vector(saved.input);
  };
  const BatchNormWritten written{image.defined() ? image : at::empty_like(saved.input),
                                 in_float(weight), in_float(bias)};
  if (!run_batch_norm_backward_plan(saved, grad, written)) return false;
  c10::SmallVector<BatchNormCopy, 2> copies;
  if (weight.defined() && !weight.is_same(written.grad_weight)) {
    copies.push_back({written.grad_weight, weight});
  }
  if (bias.defined() && !bias.is_same(written.grad_bias)) {
    copies.push_back({written.grad_bias, bias});
  }
  if (!copies.empty()) batch_norm_copy(copies);
  return true;
}

// The gradient of the output, from one reader of it or two.
struct OfOut {
  at::Tensor grad;
  OptionalTensor more;

  void add_up() {
    if (more) grad = at::add(grad, *more);
    more.reset();
  }
};

// Of the norm in training, by kernels of ours.
void backward_of_pixels(const BatchNormSaved& saved, OfOut& of_out, bool is_last,
                        const Gradients& wanted) {
  if (!saved.out || !wanted.residual.defined()) of_out.add_up();
  const at::Tensor grad = aligned(of_out.grad, is_last), input = aligned(saved.input, is_last);
  BatchNormSlope args{grad, input, saved.mean, saved.rstd};
  if (of_out.more) args.grad_more = aligned(*of_out.more, is_last);
  args.weight = contiguous(saved.weight);
  args.bias = contiguous(saved.bias);
  args.has_relu = saved.has_relu();
  if (saved.out) args.out = aligned(*saved.out, is_last);
  args.grad_input = wanted.input;
  args.grad_weight = wanted.weight;
  args.grad_bias = wanted.bias;
  if (saved.out) args.masked = wanted.residual;
  batch_norm_find_gradients(args);
  if (!saved.out && wanted.residual.defined()) wanted.residual.copy_(grad);
}

void batch_norm_gradients_cuda(const BatchNormSaved& saved, OfOut& of_out, bool is_last,
                               bool has_pixels, Gradients& wanted) {
  const bool is_of_norm =
      wanted.input.defined() || wanted.weight.defined() || wanted.bias.defined();
  if (is_of_norm && has_pixels) {
    const bool has_more = saved.has_relu() || wanted.residual.defined();
    const auto reason = reason_without_plan(saved.input, /*training=*/true, has_more);
    if (reason.empty()) {
      of_out.add_up();
      if (backward_by_plan(saved, of_out.grad, wanted)) return;
    }
    return backward_of_pixels(saved, of_out, is_last, wanted);
  }
  of_out.add_up();
  at::Tensor grad = of_out.grad;
  if (saved.has_relu()) {
    grad = through_relu(of_out.grad, *saved.out, wanted.residual);
  } else if (wanted.residual.defined()) {
    wanted.residual.copy_(grad);
  }
  if (is_of_norm) backward_by_kernels(saved, grad, is_last, wanted);
}

// The gradients of weight and bias in the dtype that these have, by one launch.
void cast_vectors(Gradients& wanted, at::ScalarType dtype) {
  if (dtype == at::kFloat) return;
  c10::SmallVector<BatchNormCopy, 2> copies;
  for (auto* vector : {&wanted.weight, &wanted.bias}) {
    if (!vector->defined() || vector->scalar_type() == dtype) continue;
    const at::Tensor cast =
        at::detail::empty_cuda(vector->sizes(), dtype, vector->device(), std::nullopt);
    copies.push_back({*vector, cast});
    *vector = cast;
  }
  if (!copies.empty()) batch_norm_copy(copies);
}

// What the forward gave, in the input's order, where that is not the one that it had then.
at::Tensor out_of(const BatchNormSaved& saved, bool is_last) {
  BatchNorm args;
  args.input = saved.input;
  args.weight = saved.weight;
  args.bias = saved.bias;
  args.activation = saved.activation;
  const at::Tensor out = at::empty_like(saved.input);
  apply(args, saved.mean, saved.rstd, /*is_variance=*/false, is_last, out);
  return out;
}

BatchNormGradients batch_norm_backward_cuda(const BatchNormBackward& backward) {
  const auto& [grad_out, given, output_mask, params_in_input_dtype, grad_more] = backward;
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
  const auto dtype = input.scalar_type();
  const auto of_params = params_in_input_dtype ? dtype : at::kFloat;
  const bool has_pixels = given.training && input.numel() > 0 && has_pixel_kernels(input);
  const auto vector = [&](bool is_wanted) {
    if (!is_wanted) return at::Tensor();
    if (input.numel() == 0) return zero_vector(input);
    return empty_vector(input, has_pixels ? of_params : at::kFloat);
  };
  Gradients wanted{empty_image(output_mask[0]), vector(output_mask[1]), vector(output_mask[2]),
                   empty_image(output_mask[3])};
  if (input.numel() > 0) {
    BatchNormSaved saved = given;
    saved.input = in_order(input, is_last);
    if (given.out) {
      saved.out = in_order(*given.out, is_last);
    } else if (saved.has_relu() && !(has_pixels && !wanted.residual.defined())) {
      saved.out = out_of(saved, is_last);
    }
    OfOut of_out{in_order(grad_out, is_last), std::nullopt};
    if (grad_more) of_out.more = in_order(*grad_more, is_last);
    batch_norm_gradients_cuda(saved, of_out, is_last, has_pixels, wanted);
  }
  if (params_in_input_dtype) cast_vectors(wanted, dtype);
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
