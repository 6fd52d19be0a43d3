// Layer norm and RMS norm on CUDA.

#include "norm_problem.h"

#include "../graph/cuda_call.h"
#include "../graph/plan_policy.h"
#include "../kernels/norm_rows.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add.h>
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

// What an operator returns for a tensor that nobody asked for.
at::Tensor or_none(const at::Tensor& tensor, const at::Tensor& input,
                   at::ScalarType dtype = at::kFloat) {
  return tensor.defined() ? tensor : empty({0}, dtype, input.device());
}

void check_cuda_dtype(const Norm& args) {
  TORCH_CHECK_TYPE(args.input.scalar_type() != at::kDouble, name_of(args),
                   ": input must be float16, bfloat16 or float32 on a GPU; got ",
                   args.input.scalar_type());
}

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

void run_forward(const Norm& args, const at::Tensor& out, const at::Tensor& mean,
                 const at::Tensor& rstd) {
  const at::Tensor x = args.input.contiguous(), shift = dense(args.bias);
  const at::Tensor factor =
      needs_weight(args, /*backward=*/false) ? neutral_weight(args) : dense(args.weight);
  auto epsilon = static_cast<float>(args.eps);
  Pointers pointers;
  pointers.read(x);
  pointers.read(factor);
  pointers.read(shift);
  pointers.all.push_back(&epsilon);
  pointers.write(mean);
  pointers.write(rstd);
  pointers.write(out);
  run(norm_params(args, rstd.defined()), pointers, x.get_device());
}

void run_backward(const Norm& args, const at::Tensor& grad_out, const at::Tensor& mean,
                  const at::Tensor& rstd, const at::Tensor& grad_input,
                  const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const at::Tensor x = args.input.contiguous(), g = grad_out.contiguous();
  const at::Tensor factor = args.weight ? args.weight->contiguous() : neutral_weight(args);
  // cuDNN computes all of them.
  const auto or_scratch = [&](const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.defined() ? tensor : empty(like.sizes(), like.scalar_type(), like.device());
  };
  const at::Tensor results[] = {or_scratch(grad_input, x), or_scratch(grad_weight, factor),
                                args.is_layer ? or_scratch(grad_bias, factor) : at::Tensor()};
  Pointers pointers;
  pointers.read(x);
  pointers.read(factor);
  pointers.read(g);
  if (args.is_layer) pointers.read(mean);
  pointers.read(rstd);
  for (const auto& result : results) pointers.write(result);
  run(norm_backward_params(args), pointers, x.get_device());
}

// Whether cuDNN's plan for exactly this size runs the call, and not the kernels for any.
bool takes_plan() {
  return graph::PlanPolicy::global().policy() == graph::Policy::kExact;
}

NormResults norm_cuda(const at::Tensor& input, const OptionalTensor& residual,
                      c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, bool is_layer, bool zero_centered,
                      bool with_stats) {
  const Norm args{input, residual, normalized_shape, weight, bias, eps, is_layer, zero_centered};
  check_norm(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(name_of(args), input.get_device());
  check_cuda_dtype(args);
  const bool is_empty = input.numel() == 0;
  const int64_t rows = is_empty ? 0 : input.numel() / row_size(normalized_shape);
  const at::Tensor out = empty(input.sizes(), input.scalar_type(), input.device());
  at::Tensor sum, mean, rstd;
  if (residual) sum = empty(input.sizes(), input.scalar_type(), input.device());
  if (with_stats) rstd = empty({rows}, at::kFloat, input.device());
  if (with_stats && is_layer) mean = empty({rows}, at::kFloat, input.device());
  if (!is_empty && takes_plan()) {
    const OptionalTensor none;
    if (residual) at::add_out(sum, input, *residual);
    run_forward({residual ? sum : input, none, normalized_shape, weight, bias, eps, is_layer,
                 zero_centered},
                out, mean, rstd);
  } else if (!is_empty) {
    norm_rows(args, out, sum, mean, rstd);
  }
  return {out, or_none(sum, input, input.scalar_type()), or_none(mean, input),
          or_none(rstd, input)};
}

NormGradients norm_backward_cuda(const at::Tensor& grad_out, const OptionalTensor& grad_sum,
                                 const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                 const OptionalTensor& weight, const at::Tensor& mean,
                                 const at::Tensor& rstd, bool is_layer, bool zero_centered,
                                 std::array<bool, 3> output_mask) {
  const c10::cuda::CUDAGuard device_guard(input.device());
  const OptionalTensor none;
  const Norm args{input, none, normalized_shape, weight, none, 0, is_layer, zero_centered};
  const auto dtype = weight ? weight->scalar_type() : input.scalar_type();
  const auto sizes = C10_AS_INTARRAYREF_SLOW(normalized_shape);
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = empty(input.sizes(), input.scalar_type(), input.device());
  if (output_mask[1]) grad_weight = empty(sizes, dtype, input.device());
  if (output_mask[2]) grad_bias = empty(sizes, dtype, input.device());
  if (input.numel() == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
  } else if (takes_plan()) {
    run_backward(args, grad_out, mean, rstd, grad_input, grad_weight, grad_bias);
    if (grad_sum && grad_input.defined()) grad_input.add_(*grad_sum);
  } else {
    norm_rows_backward(args, grad_out, grad_sum ? *grad_sum : at::Tensor(), mean, rstd, grad_input,
                       grad_weight, grad_bias);
  }
  return {or_none(grad_input, input), or_none(grad_weight, input), or_none(grad_bias, input)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_norm", cudnn_ops::norm_cuda);
  m.impl("_norm_backward", cudnn_ops::norm_backward_cuda);
}
