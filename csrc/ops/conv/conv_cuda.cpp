// Convolutions with their epilogue on CUDA.

#include "ops/conv/conv_choice.h"
#include "ops/conv/conv_transpose.h"
#include "ops/only_kernels.h"
#include "ops/or_none_cuda.h"

#include "graph/call_pointers.h"
#include "graph/warn.h"
#include "kernels/conv_epilogue.h"
#include "kernels/depthwise_conv.h"
#include "kernels/depthwise_conv1d.h"
#include "kernels/grouped_conv.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace cudnn_ops {
namespace {

constexpr const char* kAdvice = "torch.nn.functional has convolutions for the rest";

at::Tensor empty(c10::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, like.scalar_type(), like.device(),
                                graph::channels_last(like));
}

at::Tensor empty(const graph::TensorDesc& desc, const at::Tensor& like) {
  return empty({desc.sizes.data(), static_cast<size_t>(desc.rank)}, like);
}

at::Tensor empty_laid_out(c10::IntArrayRef sizes, const at::Tensor& like, const Conv& args) {
  if (!is_length_last(args)) return empty(sizes, like);
  return at::detail::empty_cuda(sizes, like.scalar_type(), like.device(), std::nullopt);
}

// As plans and kernels require it: an image, of one row where there is one dimension, addressable
// with its channels last; a copy where it is not. `op`, if any, warns of the copy.
at::Tensor image_of(const at::Tensor& tensor, const char* op = nullptr) {
  constexpr int64_t kOneDimension = 3;
  const at::Tensor image = tensor.dim() == kOneDimension ? tensor.unsqueeze(2) : tensor;
  if (graph::is_addressable(image, graph::Strides::kChannelsLast)) return image;
  const auto format = graph::channels_last(image);
  if (op != nullptr && image.is_contiguous(format)) {
    CUDNN_OPS_WARN_ONCE(
        op,
        ": an input or a weight starts at an address that is no multiple of 16 and is "
        "copied at every call");
  } else if (op != nullptr) {
    CUDNN_OPS_WARN_ONCE(op,
                        ": an input or a weight does not have its channels last and is copied at "
                        "every call; model.to(memory_format=torch.channels_last) lays them out so "
                        "for good");
  }
  return image.clone(format);
}

// As the call's results lie in memory: an image with its channels last, or with the length last.
at::Tensor laid_out(const at::Tensor& tensor, const Conv& args, const char* op = nullptr) {
  return is_length_last(args) ? tensor.contiguous() : image_of(tensor, op);
}

// A result as the operator gives it: with as many dimensions as the input, in the call's layout.
at::Tensor result_of(const at::Tensor& tensor, const Conv& args) {
  const bool is_image = tensor.defined() && args.dims() == 1 && tensor.dim() > args.input.dim();
  if (!is_image) return tensor;
  const at::Tensor row = tensor.squeeze(2);
  return is_length_last(args) ? row.contiguous() : row;
}

graph::Call call_of(const char* op, const graph::CallPointers& pointers) {
  return {op, kAdvice, pointers.all, pointers.written, at::globalContext().benchmarkCuDNN()};
}

// How much of the epilogue cuDNN was found to support in one graph, by the key of the whole: all,
// until it refuses that.
class KnownFusions {
 public:
  ConvFusion of(const graph::PlanKey& whole) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = fusions_.find(whole);
    return found == fusions_.end() ? ConvFusion::kAll : found->second;
  }
  void set(const graph::PlanKey& whole, ConvFusion fusion) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fusions_.insert_or_assign(whole, fusion);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<graph::PlanKey, ConvFusion, graph::PlanKeyHash> fusions_;
};

KnownFusions& known_fusions() {
  static auto* all = new KnownFusions();
  return *all;
}

// The tensors of a call as plans require them.
struct Images {
  at::Tensor input, weight;
  OptionalTensor bias, residual;

  explicit Images(const Conv& args)
      : input(image_of(args.input, args.op())), weight(image_of(args.weight, args.op())) {
    if (args.bias) bias = graph::dense(*args.bias);
    if (args.residual) residual = image_of(*args.residual, args.op());
  }
};

DepthwiseSteps depthwise_steps(const Conv& args) {
  const auto& geometry = args.geometry;
  return {geometry.stride(0), geometry.dilation(0), geometry.before(0), is_length_last(args)};
}

// What has been computed; `before` only where that is a result beside another.
struct Convolved {
  at::Tensor out, before;
  ConvFusion fusion;
};

// The convolution and as much of the epilogue as cuDNN supports in one graph and is fast with.
Convolved convolve(const Conv& args, const Images& images, bool with_before) {
  const int device = images.input.get_device();
  ConvParams params = conv_params(args, ConvFusion::kAll, with_before);
  const auto whole = graph::PlanKey::of(params, device);
  auto key = whole;
  ConvFusion fusion = known_fusions().of(whole);
  while (true) {
    if (fusion != ConvFusion::kAll) params = conv_params(args, fusion, with_before);
    if (!reason_for_bare(params).empty()) {
      fusion = ConvFusion::kNone;
      params = conv_params(args, fusion, with_before);
    }
    if (fusion != ConvFusion::kAll) key = graph::PlanKey::of(params, device);
    const at::Tensor out = empty(params.out, images.input);
    const at::Tensor before =
        params.before.rank > 0 ? empty(params.before, images.input) : at::Tensor();
    graph::CallPointers pointers;
    pointers.read(images.input);
    pointers.read(images.weight);
    if (params.bias.rank > 0) pointers.read(*images.bias);
    if (params.residual.rank > 0) pointers.read(*images.residual);
    pointers.write(before);
    pointers.write(out);
    const graph::Call call = call_of(args.op(), pointers);
    const auto plan =
        fusion == ConvFusion::kNone ? graph::get_plan(call, key) : graph::plan_or_null(call, key);
    if (plan != nullptr) {
      graph::execute(call, *plan);
      return {out, before, fusion};
    }
    fusion = static_cast<ConvFusion>(static_cast<int64_t>(fusion) + 1);
    known_fusions().set(whole, fusion);
  }
}

// Rows of a matrix, one an image, in the order of its memory.
at::Tensor matrix(const at::Tensor& image) {
  return image.movedim(1, -1).flatten(1);
}

// The convolution alone, as a product: sums are in float32, however that is divided.
Convolved multiply(const Conv& args, const Images& images) {
  const OnlyKernels guard;
  const at::Tensor out = empty(conv_params(args, ConvFusion::kNone, false).out, images.input);
  matrix(out).copy_(at::mm(matrix(images.input), matrix(images.weight).t(), at::kFloat));
  return {out, at::Tensor(), ConvFusion::kNone};
}

// All of it, by a kernel of ours.
Convolved convolve_depthwise(const Conv& args, bool with_before) {
  const at::Tensor input = laid_out(args.input, args, args.op());
  at::DimVector sizes;
  for (const auto& size : conv_output_sizes(args)) sizes.push_back(size.expect_int());
  const DepthwiseSteps steps = depthwise_steps(args);
  if (!steps.is_length_last) sizes.insert(sizes.begin() + 2, 1);
  OptionalTensor bias, residual;
  if (args.bias) bias = args.bias->contiguous();
  if (args.residual) residual = laid_out(*args.residual, args, args.op());
  const at::Tensor out = empty_laid_out(sizes, input, args);
  const at::Tensor before = with_before ? empty_laid_out(sizes, input, args) : at::Tensor();
  depthwise_conv1d(input, args.weight.contiguous(), steps, bias, residual, args.kind(), before,
                   out);
  return {out, before, ConvFusion::kAll};
}

DepthwiseConvSteps image_steps(const Conv& args) {
  DepthwiseConvSteps steps;
  const auto& geometry = args.geometry;
  const size_t first = steps.stride.size() - args.dims();
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    steps.stride[first + dim] = geometry.stride(dim);
    steps.dilation[first + dim] = geometry.dilation(dim);
    steps.padding[first + dim] = geometry.before(dim);
  }
  return steps;
}

// Likewise, of an image.
Convolved convolve_depthwise_image(const Conv& args, bool with_before) {
  const at::Tensor input = image_of(args.input, args.op());
  at::DimVector sizes;
  for (const auto& size : conv_output_sizes(args)) sizes.push_back(size.expect_int());
  OptionalTensor bias, residual;
  if (args.bias) bias = args.bias->contiguous();
  if (args.residual) residual = image_of(*args.residual, args.op());
  const at::Tensor out = empty(sizes, input);
  const at::Tensor before = with_before ? empty(sizes, input) : at::Tensor();
  depthwise_conv(input, args.weight.contiguous(), image_steps(args), bias, residual, args.kind(),
                 before, out);
  return {out, before, ConvFusion::kAll};
}

GroupedConvSteps grouped_steps(const Conv& args) {
  GroupedConvSteps steps;
  const auto& geometry = args.geometry;
  for (size_t dim = 0; dim < 2; ++dim) {
    steps.stride.at(dim) = geometry.stride(dim);
    steps.dilation.at(dim) = geometry.dilation(dim);
    steps.padding.at(dim) = geometry.before(dim);
  }
  return steps;
}

// Likewise, of an image in groups.
Convolved convolve_grouped(const Conv& args, const Images& images, bool with_before) {
  const at::Tensor out = empty(conv_params(args, ConvFusion::kNone, false).out, images.input);
  const at::Tensor before = with_before ? empty(out.sizes(), out) : at::Tensor();
  grouped_conv(images.input, images.weight, grouped_steps(args), images.bias, images.residual,
               args.kind(), before, out);
  return {out, before, ConvFusion::kAll};
}

// The part of the epilogue that the plan did not compute, in one pass.
void add_rest(const Conv& args, const Images& images, bool with_before, Convolved& convolved) {
  if (convolved.fusion == ConvFusion::kAll) return;
  const OptionalTensor nothing;
  const auto& bias = convolved.fusion == ConvFusion::kNone ? images.bias : nothing;
  const auto& residual = convolved.fusion >= ConvFusion::kBias ? images.residual : nothing;
  if (args.kind() == Activation::kNone && !bias && !residual) return;
  const at::Tensor conv = convolved.out;
  // One of the two is written in place.
  if (with_before) convolved.before = conv, convolved.out = empty(conv.sizes(), conv);
  conv_epilogue_forward(conv, bias, residual, args.kind(), convolved.before, convolved.out);
}

// With its epilogue, by the kernel that is the fastest.
Convolved convolve_by_choice(const Conv& args, bool with_before) {
  const ConvKernel kernel = choose_kernel(args, ConvStep::kForward).kernel;
  if (kernel == ConvKernel::kDepthwise) return convolve_depthwise(args, with_before);
  if (kernel == ConvKernel::kDepthwiseImages) return convolve_depthwise_image(args, with_before);
  const Images images(args);
  if (kernel == ConvKernel::kGrouped) return convolve_grouped(args, images, with_before);
  Convolved convolved =
      kernel == ConvKernel::kProduct ? multiply(args, images) : convolve(args, images, with_before);
  add_rest(args, images, with_before, convolved);
  return convolved;
}

at::Tensor gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight,
                    const at::Tensor& of_bias = {});

// The transposed convolution and as much of the epilogue as cuDNN supports in one graph.
Convolved transpose(const Conv& args, const Images& images, bool with_before) {
  if (has_no_mirror(args)) return {transpose_by_torch(args), at::Tensor(), ConvFusion::kNone};
  const Conv mirror = mirror_of(args);
  if (choose_kernel(mirror, ConvStep::kInputGradient).kernel == ConvKernel::kPlan) {
    return convolve(args, images, with_before);
  }
  return {gradient(mirror, images.input, /*is_of_weight=*/false), at::Tensor(), ConvFusion::kNone};
}

ConvResults conv_cuda(const ConvForward& forward) {
  const Conv& args = forward.conv;
  const auto& input = args.input;
  check_conv(args);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble, args.op(),
                   ": input must be float16, bfloat16 or float32 on a GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(args.op(), input.get_device());
  const bool with_before = forward.with_before && needs_before(args.kind());
  Convolved convolved;
  if (input.numel() == 0) {
    const auto params = conv_params(args, ConvFusion::kNone, false);
    convolved.out = empty(params.out, input);
    if (with_before) convolved.before = empty(params.out, input);
  } else if (args.geometry.is_transposed()) {
    const Images images(args);
    convolved = transpose(args, images, with_before);
    add_rest(args, images, with_before, convolved);
  } else {
    convolved = convolve_by_choice(args, with_before);
  }
  return {result_of(convolved.out, args),
          or_none(result_of(convolved.before, args), input, input.scalar_type())};
}

// By a kernel of ours, in the call's layout.
at::Tensor depthwise_gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight) {
  DepthwiseSteps steps = depthwise_steps(args);
  if (is_of_weight) {
    const at::Tensor image = args.weight.unsqueeze(2);
    const at::Tensor result = empty(image.sizes(), image);
    depthwise_conv1d_weight(laid_out(args.input, args, args.op()), grad, steps, result);
    return result;
  }
  at::DimVector sizes(grad.sizes());
  sizes.back() = args.input.size(2);
  const at::Tensor result = empty_laid_out(sizes, grad, args), weight = args.weight.contiguous();
  if (steps.stride != 1) {
    depthwise_conv1d_input(grad, weight, steps, result);
    return result;
  }
  // The outputs' gradients take the inputs' place, with the taps turned around.
  steps.is_turned = true;
  steps.padding = (args.weight.size(2) - 1) * steps.dilation - steps.padding;
  depthwise_conv1d(grad, weight, steps, /*bias=*/{}, /*residual=*/{}, Activation::kNone,
                   /*before=*/{}, result);
  return result;
}

// Likewise; with the weight's, the bias's too if `of_bias` is defined.
at::Tensor depthwise_image_gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight,
                                    const at::Tensor& of_bias) {
  const at::Tensor image = image_of(grad);
  const auto& like = is_of_weight ? args.weight : args.input;
  const at::Tensor result = empty(like.sizes(), like);
  if (is_of_weight) {
    depthwise_conv_weight(image_of(args.input, args.op()), image, image_steps(args), result,
                          of_bias);
  } else {
    depthwise_conv_input(image, args.weight.contiguous(), image_steps(args), result);
  }
  return result;
}

// Each group's weights with inputs and outputs exchanged.
at::Tensor exchanged(const at::Tensor& weight, int64_t groups) {
  const OnlyKernels guard;
  const int64_t inputs = weight.size(1), outputs = weight.size(0) / groups;
  const int64_t rows = weight.size(2), columns = weight.size(3);
  const at::Tensor result = empty({groups * inputs, outputs, rows, columns}, weight);
  const auto by_group = [&](const at::Tensor& of, int64_t first, int64_t second) {
    return of.permute({0, 2, 3, 1}).view({groups, first, rows, columns, second});
  };
  by_group(result, inputs, outputs).copy_(by_group(weight, outputs, inputs).transpose(1, 4));
  return result;
}

// Of an image in groups: convolutions of the output's gradient, one for the inputs of each
// remainder by the stride, which the same taps reach.
void grouped_input_gradient(const Conv& args, const at::Tensor& grad, const at::Tensor& weight,
                            const at::Tensor& result) {
  const GroupedConvSteps forward = grouped_steps(args);
  const at::Tensor turned = exchanged(weight, args.geometry.groups());
  GroupedConvSteps steps;
  steps.out_step = steps.tap_step = forward.stride;
  for (steps.out_first[0] = 0; steps.out_first[0] < forward.stride[0]; ++steps.out_first[0]) {
    for (steps.out_first[1] = 0; steps.out_first[1] < forward.stride[1]; ++steps.out_first[1]) {
      for (size_t dim = 0; dim < 2; ++dim) {
        const int64_t reach = steps.out_first.at(dim) + forward.padding.at(dim);
        steps.tap_first.at(dim) = reach % forward.stride.at(dim);
        steps.padding.at(dim) = -(reach / forward.stride.at(dim));
        steps.dilation.at(dim) = -forward.dilation.at(dim);
      }
      grouped_conv(grad, turned, steps, /*bias=*/{}, /*residual=*/{}, Activation::kNone,
                   /*before=*/{}, result);
    }
  }
}

// As a product; `other` is the weight, or the input.
void multiply_gradient(const at::Tensor& grad, const at::Tensor& other, bool is_of_weight,
                       const at::Tensor& result) {
  const OnlyKernels guard;
  const at::Tensor rows = matrix(grad);
  at::Tensor out = matrix(result);
  at::mm_out(out, is_of_weight ? rows.t() : rows, matrix(other));
}

// The gradient of the input or that of the weight, from that of the convolution's result. `of_bias`
// is for kernels that compute it with the weight's.
at::Tensor gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight,
                    const at::Tensor& of_bias) {
  const auto step = is_of_weight ? ConvStep::kWeightGradient : ConvStep::kInputGradient;
  const ConvKernel kernel = grad.numel() > 0 ? choose_kernel(args, step).kernel : ConvKernel::kPlan;
  if (kernel == ConvKernel::kDepthwise) return depthwise_gradient(args, grad, is_of_weight);
  if (kernel == ConvKernel::kDepthwiseImages) {
    return depthwise_image_gradient(args, grad, is_of_weight, of_bias);
  }
  const at::Tensor image = image_of(grad);
  const auto params = conv_backward_params(args, is_of_weight);
  const auto& desc = is_of_weight ? params.weight : params.input;
  const at::Tensor result = empty(desc, image);
  if (image.numel() == 0) return result.zero_();
  const at::Tensor other = image_of(is_of_weight ? args.input : args.weight, args.op());
  if (kernel == ConvKernel::kProduct) {
    multiply_gradient(image, other, is_of_weight, result);
    return result;
  }
  if (kernel == ConvKernel::kGrouped) {
    grouped_input_gradient(args, image, other, result);
    return result;
  }
  graph::CallPointers pointers;
  pointers.read(other);
  pointers.read(image);
  pointers.write(result);
  const graph::Call call = call_of(args.op(), pointers);
  const auto key = graph::PlanKey::of(params, image.get_device());
  graph::execute(call, *graph::get_plan(call, key));
  return result;
}

// The same of a transposed convolution.
at::Tensor transposed_gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight) {
  const at::Tensor of_out = args.dims() == 1 ? grad.squeeze(2) : grad;
  if (grad.numel() == 0 && !is_of_weight) {
    return empty(conv_params(args, ConvFusion::kNone, false).input, grad);
  }
  if (has_no_mirror(args) && grad.numel() > 0) {
    return transposed_gradient_by_torch(args, of_out, is_of_weight);
  }
  const Conv mirror = mirror_of(args, of_out);
  if (is_of_weight) return gradient(mirror, image_of(args.input), is_of_weight);
  return convolve_by_choice(mirror, /*with_before=*/false).out;
}

// Writes the gradient of what the activation is of to `grad`, and its sum over all but the channels
// to `of_bias`, as far as they are wanted.
void epilogue_gradient(const Conv& args, const at::Tensor& of_out, const OptionalTensor& saved,
                       const at::Tensor& grad, const at::Tensor& of_bias) {
  const bool is_linear = args.kind() == Activation::kNone;
  if (!is_length_last(args)) {
    return conv_epilogue_backward(of_out, saved, args.kind(), is_linear ? at::Tensor() : grad,
                                  of_bias);
  }
  // Rows of a matrix: the columns, which the kernel would add up, are no channels.
  const auto rows = [](const at::Tensor& tensor) { return tensor.flatten(0, 1); };
  if (!is_linear) {
    conv_epilogue_backward(rows(of_out), rows(*saved), args.kind(), rows(grad), /*grad_bias=*/{});
  }
  if (of_bias.defined()) {
    const OnlyKernels guard;
    at::Tensor sum = of_bias;
    at::sum_out(sum, grad, c10::IntArrayRef{0, 2});
  }
}

ConvGradients conv_backward_cuda(const ConvMaskedBackward& masked) {
  const auto& [backward, output_mask] = masked;
  const Conv args = backward.forward.conv();
  const auto &input = args.input, &weight = args.weight;
  const c10::cuda::CUDAGuard device_guard(input.device());
  check_conv_backward(backward);
  const at::Tensor of_out = laid_out(backward.grad_out, args);
  const bool is_linear = args.kind() == Activation::kNone;
  const at::Tensor grad = is_linear ? of_out : empty_laid_out(of_out.sizes(), of_out, args);
  at::Tensor of_input, of_weight, of_bias, of_residual;
  if (output_mask[2]) {
    of_bias = at::detail::empty_cuda({args.out_channels().expect_int()}, input.options());
  }
  const bool is_transposed = args.geometry.is_transposed();
  const bool is_with_weight =
      is_linear && output_mask[1] && output_mask[2] && grad.numel() > 0 && !is_transposed &&
      choose_kernel(args, ConvStep::kWeightGradient).kernel == ConvKernel::kDepthwiseImages;
  if (grad.numel() == 0) {
    if (of_bias.defined()) of_bias.zero_();
  } else if ((output_mask[2] && !is_with_weight) || !is_linear) {
    OptionalTensor saved;
    if (backward.forward.saved) saved = laid_out(*backward.forward.saved, args);
    epilogue_gradient(args, of_out, saved, grad, of_bias);
  }
  const auto gradient_of = [&](bool is_of_weight) {
    if (is_transposed) return transposed_gradient(args, grad, is_of_weight);
    return gradient(args, grad, is_of_weight, is_with_weight ? of_bias : at::Tensor());
  };
  if (output_mask[0]) of_input = result_of(gradient_of(/*is_of_weight=*/false), args);
  if (output_mask[1]) {
    of_weight = result_of(gradient_of(/*is_of_weight=*/true), args);
    // In the weight's layout: autograd would copy any other.
    const at::Tensor like = args.dims() == 1 ? weight.unsqueeze(2) : weight;
    if (!like.is_contiguous(graph::channels_last(like))) of_weight = of_weight.contiguous();
  }
  if (output_mask[3]) of_residual = result_of(is_linear ? grad.clone() : grad, args);
  const auto dtype = input.scalar_type();
  return {or_none(of_input, input, dtype), or_none(of_weight, input, dtype),
          or_none(of_bias, input, dtype), or_none(of_residual, input, dtype)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_conv", cudnn_ops::kernel<cudnn_ops::conv_cuda>);
  m.impl("_conv_backward", cudnn_ops::kernel<cudnn_ops::conv_backward_cuda>);
}
