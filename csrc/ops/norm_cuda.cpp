// Layer norm and RMS norm on CUDA.

#include "norm_problem.h"

#include "../graph/cuda_call.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Device& device) {
  return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
}

// The addresses of a call, and which of them the plan writes.
struct Pointers {
  c10::SmallVector<void*, 10> all;
  c10::SmallVector<graph::Call::Written, 4> written;

  void read(const at::Tensor& tensor) {
    if (tensor.defined()) all.push_back(const_cast<void*>(tensor.const_data_ptr()));
  }
  void write(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    written.push_back({all.size(), tensor.nbytes()});
    all.push_back(tensor.mutable_data_ptr());
  }
  graph::Call call(bool is_layer) const {
    const char* advice = is_layer ? "torch.nn.functional.layer_norm has kernels for the rest"
                                  : "torch.nn.functional.rms_norm has kernels for the rest";
    return {is_layer ? "cudnn_ops.layer_norm" : "cudnn_ops.rms_norm", advice, all, written};
  }
};

template <class Params>
void run(const Params& params, const Pointers& pointers, int device) {
  const graph::Call call = pointers.call(params.is_layer);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, device)));
}

at::Tensor dense(const OptionalTensor& parameter) {
  return parameter ? parameter->contiguous() : at::Tensor();
}

// The weight that changes nothing.
at::Tensor neutral_weight(const Norm& args) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(args.normalized_shape);
  const auto options = args.input.options();
  return args.zero_centered ? at::zeros(sizes, options) : at::ones(sizes, options);
}

OutAndStats norm_cuda(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                      bool is_layer, bool zero_centered, bool with_stats) {
  const Norm args{input, normalized_shape, weight, bias, eps, is_layer, zero_centered};
  check_norm(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(name_of(args), input.get_device());
  const int64_t size = row_size(normalized_shape);
  const int64_t rows = size == 0 ? 0 : input.numel() / size;
  const at::Tensor out = empty(input.sizes(), input.scalar_type(), input.device());
  const at::Tensor mean = empty({with_stats && is_layer ? rows : 0}, at::kFloat, input.device());
  const at::Tensor rstd = empty({with_stats ? rows : 0}, at::kFloat, input.device());
  if (input.numel() > 0) {
    const at::Tensor x = input.contiguous();
    at::Tensor factor = dense(weight);
    const at::Tensor shift = dense(bias);
    if (needs_weight(args, /*backward=*/false)) factor = neutral_weight(args);
    auto epsilon = static_cast<float>(eps);
    Pointers pointers;
    pointers.read(x);
    pointers.read(factor);
    pointers.read(shift);
    pointers.all.push_back(&epsilon);
    if (with_stats && is_layer) pointers.write(mean);
    if (with_stats) pointers.write(rstd);
    pointers.write(out);
    run(norm_params(args, with_stats), pointers, input.get_device());
  }
  return {out, mean, rstd};
}

NormGradients norm_backward_cuda(const at::Tensor& grad_out, const at::Tensor& input,
                                 c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                 const at::Tensor& mean, const at::Tensor& rstd, bool is_layer,
                                 bool zero_centered, std::array<bool, 3> output_mask) {
  const c10::cuda::CUDAGuard device_guard(input.device());
  const OptionalTensor none;
  const Norm args{input, normalized_shape, weight, none, 0, is_layer, zero_centered};
  const at::Tensor grad_input = empty(input.sizes(), input.scalar_type(), input.device());
  const at::Tensor factor =
      needs_weight(args, /*backward=*/true) ? neutral_weight(args) : dense(weight);
  const at::Tensor grad_weight = empty(factor.sizes(), factor.scalar_type(), input.device());
  const at::Tensor grad_bias =
      is_layer ? empty(factor.sizes(), factor.scalar_type(), input.device()) : at::Tensor();
  if (input.numel() == 0) {
    grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
  } else {
    const at::Tensor x = input.contiguous(), g = grad_out.contiguous();
    Pointers pointers;
    pointers.read(x);
    pointers.read(factor);
    pointers.read(g);
    if (is_layer) pointers.read(mean);
    pointers.read(rstd);
    pointers.write(grad_input);
    pointers.write(grad_weight);
    pointers.write(grad_bias);
    run(norm_backward_params(args), pointers, input.get_device());
  }
  const auto wanted = [&](bool is_wanted, const at::Tensor& gradient) {
    return is_wanted ? gradient : empty({0}, at::kFloat, input.device());
  };
  return {wanted(output_mask[0], grad_input), wanted(output_mask[1], grad_weight),
          wanted(output_mask[2], grad_bias)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_norm", cudnn_ops::norm_cuda);
  m.impl("_norm_backward", cudnn_ops::norm_backward_cuda);
}
