// Convolutions with their epilogue on CUDA.

#include "conv_problem.h"
#include "or_none_cuda.h"

#include "../graph/call_pointers.h"
#include "../kernels/conv_epilogue.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.conv";
constexpr const char* kAdvice = "torch.nn.functional has convolutions for the rest";

at::Tensor empty(c10::IntArrayRef sizes, const at::Tensor& like,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_cuda(sizes, like.scalar_type(), like.device(), format);
}

at::Tensor with_channels_last(const at::Tensor& tensor) {
  const auto format = channels_last(tensor);
  if (!tensor.is_contiguous(format)) {
    TORCH_WARN_ONCE(kOp,
                    ": an input or a weight does not have its channels last and is copied at every "
                    "call; model.to(memory_format=torch.channels_last) lays them out so for good");
  }
  return tensor.contiguous(format);
}

graph::Call call_of(const graph::CallPointers& pointers) {
  return {kOp, kAdvice, pointers.all, pointers.written, at::globalContext().benchmarkCuDNN()};
}

// What plans were found to take, by the key of the whole; that until cuDNN refuses it.
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

// What a plan has computed; `before` only where that is a result beside another.
struct Convolved {
  at::Tensor out, before;
  ConvFusion fusion;
};

// The convolution and as much of the epilogue as cuDNN takes in one graph.
Convolved convolve(const Conv& args, bool with_before) {
  const at::Tensor x = with_channels_last(args.input), w = with_channels_last(args.weight);
  const at::Tensor bias = args.bias ? args.bias->contiguous() : at::Tensor();
  const at::Tensor residual = args.residual ? with_channels_last(*args.residual) : at::Tensor();
  const int device = x.get_device();
  ConvParams params = conv_params(args, ConvFusion::kAll, with_before);
  const auto whole = graph::PlanKey::of(params, device);
  auto key = whole;
  ConvFusion fusion = known_fusions().of(whole);
  while (true) {
    if (fusion != ConvFusion::kAll) {
      params = conv_params(args, fusion, with_before);
      key = graph::PlanKey::of(params, device);
    }
    const c10::IntArrayRef sizes(params.out.sizes.data(), static_cast<size_t>(params.out.rank));
    const at::Tensor out = empty(sizes, x, channels_last(x));
    const at::Tensor before =
        params.before.rank > 0 ? empty(sizes, x, channels_last(x)) : at::Tensor();
    graph::CallPointers pointers;
    pointers.read(x);
    pointers.read(w);
    if (params.bias.rank > 0) pointers.read(bias);
    if (params.residual.rank > 0) pointers.read(residual);
    pointers.write(before);
    pointers.write(out);
    const graph::Call call = call_of(pointers);
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

// Adds to a result what its plan did not.
void add_rest(const Conv& args, const Convolved& convolved) {
  if (convolved.fusion == ConvFusion::kNone && args.bias) {
    std::vector<int64_t> one(static_cast<size_t>(convolved.out.dim()), 1);
    one[1] = -1;
    convolved.out.add_(args.bias->view(one));
  }
  if (convolved.fusion >= ConvFusion::kBias && args.residual) convolved.out.add_(*args.residual);
}

ConvResults conv_cuda(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& residual, c10::IntArrayRef geometry, int64_t activation,
                      bool with_before) {
  const auto kind = static_cast<ConvActivation>(activation);
  const Conv args{input, weight, bias, residual, geometry, kind};
  check_conv(args);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble, kOp,
                   ": input must be float16, bfloat16 or float32 on a GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(kOp, input.get_device());
  with_before = with_before && needs_before(kind);
  if (input.numel() == 0) {
    const auto sizes = conv_params(args, ConvFusion::kNone, false).out.sizes;
    const at::Tensor out =
        empty({sizes.data(), static_cast<size_t>(input.dim())}, input, channels_last(input));
    return {out, or_none(with_before ? out.clone() : at::Tensor(), input, input.scalar_type())};
  }
  Convolved convolved = convolve(args, with_before);
  if (convolved.fusion != ConvFusion::kAll) {
    add_rest(args, convolved);
    convolved.before = convolved.out;
    convolved.out = activate(convolved.before, kind);
  }
  return {convolved.out,
          or_none(with_before ? convolved.before : at::Tensor(), input, input.scalar_type())};
}

// The gradient of the input or that of the weight, from that of the convolution's result.
at::Tensor gradient(const Conv& args, const at::Tensor& grad, bool is_of_weight) {
  const at::Tensor& like = is_of_weight ? args.weight : args.input;
  const at::Tensor result = empty(like.sizes(), like, channels_last(like));
  if (grad.numel() == 0) return result.zero_();
  const at::Tensor other = with_channels_last(is_of_weight ? args.input : args.weight);
  graph::CallPointers pointers;
  pointers.read(other);
  pointers.read(grad);
  pointers.write(result);
  const graph::Call call = call_of(pointers);
  const auto key = graph::PlanKey::of(conv_backward_params(args, is_of_weight), grad.get_device());
  graph::execute(call, *graph::get_plan(call, key));
  // As the weight lies: autograd would copy another.
  const bool is_last = !is_of_weight || like.is_contiguous(channels_last(like));
  return is_last ? result : result.contiguous();
}

ConvGradients conv_backward_cuda(const at::Tensor& grad_out, const at::Tensor& input,
                                 const at::Tensor& weight, const OptionalTensor& saved,
                                 c10::IntArrayRef geometry, int64_t activation,
                                 std::array<bool, 4> output_mask) {
  const c10::cuda::CUDAGuard device_guard(input.device());
  const OptionalTensor nothing;
  const auto kind = static_cast<ConvActivation>(activation);
  const Conv args{input, weight, nothing, nothing, geometry, kind};
  check_conv_backward(args, grad_out, saved);
  const auto format = channels_last(input);
  const at::Tensor of_out = grad_out.contiguous(format);
  const bool is_linear = kind == ConvActivation::kNone;
  const at::Tensor grad = is_linear ? of_out : empty(of_out.sizes(), of_out, format);
  at::Tensor of_input, of_weight, of_bias, of_residual;
  if (output_mask[2]) of_bias = empty({weight.size(0)}, input, std::nullopt);
  if (grad.numel() == 0) {
    if (of_bias.defined()) of_bias.zero_();
  } else if (output_mask[2] || !is_linear) {
    conv_epilogue_backward(of_out, saved, kind, is_linear ? at::Tensor() : grad,
                           output_mask[2] ? of_bias : at::Tensor());
  }
  if (output_mask[0]) of_input = gradient(args, grad, /*is_of_weight=*/false);
  if (output_mask[1]) of_weight = gradient(args, grad, /*is_of_weight=*/true);
  if (output_mask[3]) of_residual = is_linear ? grad.clone() : grad;
  const auto dtype = input.scalar_type();
  return {or_none(of_input, input, dtype), or_none(of_weight, input, dtype),
          or_none(of_bias, input, dtype), or_none(of_residual, input, dtype)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_conv", cudnn_ops::conv_cuda);
  m.impl("_conv_backward", cudnn_ops::conv_backward_cuda);
}
