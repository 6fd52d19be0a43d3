// Layer norm and RMS norm on CUDA.

#include "ops/norm/norm_choice.h"
#include "ops/norm/norm_problem.h"
#include "ops/or_none_cuda.h"

#include "graph/call_pointers.h"
#include "graph/plan_policy.h"
#include "kernels/device_kernel.h"
#include "kernels/norm_rows.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Device& device) {
  return at::detail::empty_cuda(sizes, dtype, device, std::nullopt);
}

graph::Call call_of(const graph::CallPointers& pointers, const char* op, bool is_layer) {
  const char* advice = is_layer ? "torch.nn.functional.layer_norm has kernels for the rest"
                                : "torch.nn.functional.rms_norm has kernels for the rest";
  return {op, advice, pointers.all, pointers.written};
}

void check_cuda_dtype(const Norm& args) {
  TORCH_CHECK_TYPE(args.input.scalar_type() != at::kDouble, name_of(args),
                   ": input must be float16, bfloat16 or float32 on a GPU; got ",
                   args.input.scalar_type());
}

// Runs the plan; unless `is_must`, only if a size that is called often has one.
template <class Params>
bool run(const Params& params, const graph::CallPointers& pointers, const char* op, int device,
         bool is_must) {
  const graph::Call call = call_of(pointers, op, params.is_layer);
  const auto key = graph::PlanKey::of(params, device);
  const auto plan = is_must ? graph::get_plan(call, key) : graph::often_called_plan(call, key);
  if (plan != nullptr) graph::execute(call, *plan);
  return plan != nullptr;
}

using graph::dense;

bool is_dense(const at::Tensor& tensor) {
  return graph::is_addressable(tensor, graph::Strides::kDense);
}

at::Tensor dense_or_none(const OptionalTensor& parameter) {
  return parameter ? dense(*parameter) : at::Tensor();
}

at::IntArrayRef shape_of(const Norm& args) {
  return C10_AS_INTARRAYREF_SLOW(c10::SymIntArrayRef(args.normalized_shape));
}

// The weight that changes nothing.
at::Tensor neutral_weight(const Norm& args) {
  const auto sizes = shape_of(args);
  const auto options = args.input.options();
  return args.zero_centered ? at::zeros(sizes, options) : at::ones(sizes, options);
}

// The norm of the input, whatever the residual. Messages begin with `op`.
bool run_forward(const Norm& args, const char* op, const at::Tensor& out, const at::Tensor& mean,
                 const at::Tensor& rstd, bool is_must) {
  const at::Tensor x = dense(args.input), shift = dense_or_none(args.bias);
  const at::Tensor factor =
      needs_weight(args, /*backward=*/false) ? neutral_weight(args) : dense_or_none(args.weight);
  auto epsilon = static_cast<float>(args.eps);
  graph::CallPointers pointers;
  pointers.read(x);
  pointers.read(factor);
  pointers.read(shift);
  pointers.all.push_back(&epsilon);
  pointers.write(mean);
  pointers.write(rstd);
  pointers.write(out);
  return run(norm_params(args, rstd.defined()), pointers, op, x.get_device(), is_must);
}

bool run_backward(const Norm& args, const at::Tensor& grad_out, const at::Tensor& mean,
                  const at::Tensor& rstd, const at::Tensor& grad_input,
                  const at::Tensor& grad_weight, const at::Tensor& grad_bias, bool is_must) {
  const at::Tensor x = dense(args.input), g = dense(grad_out);
  const at::Tensor factor = args.weight ? dense(*args.weight) : neutral_weight(args);
  const at::Tensor center = args.is_layer ? dense(mean) : at::Tensor(), scale = dense(rstd);
  // cuDNN computes all of them.
  const auto or_scratch = [&](const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.defined() ? tensor : empty(like.sizes(), like.scalar_type(), like.device());
  };
  const at::Tensor results[] = {or_scratch(grad_input, x), or_scratch(grad_weight, factor),
                                args.is_layer ? or_scratch(grad_bias, factor) : at::Tensor()};
  graph::CallPointers pointers;
  pointers.read(x);
  pointers.read(factor);
  pointers.read(g);
  pointers.read(center);
  pointers.read(scale);
  for (const auto& result : results) pointers.write(result);
  return run(norm_backward_params(args), pointers, name_of(args), x.get_device(), is_must);
}

bool is_exact() {
  return graph::PlanPolicy::global().policy() == graph::Policy::kExact;
}

// Whether cuDNN's plan may be worth having, once the size is called often. A plan costs the host
// one or two microseconds more than our kernels: below these bytes the GPU finishes before the
// host. And for rows that do not all start at a multiple of kAlignment a backward engine was seen
// to take ten times as long as our kernels.
bool is_for_cudnn(const Norm& args, NormPlan plan, const OptionalTensor& grad_out) {
  const int64_t least_bytes = plan == NormPlan::kBackward ? 4 << 20 : 32 << 20;
  const auto& input = args.input;
  const auto bytes = static_cast<int64_t>(input.nbytes());
  if (bytes < least_bytes || args.residual || !args.weight || !is_dense(input) ||
      !is_dense(*args.weight) || (args.bias && !is_dense(*args.bias)) ||
      (grad_out && !is_dense(*grad_out)) || at::globalContext().deterministicAlgorithms()) {
    return false;
  }
  const int64_t row_bytes =
      row_size(args.normalized_shape) * static_cast<int64_t>(input.element_size());
  return row_bytes % graph::TensorDesc::kAlignment == 0 &&
         is_cudnn_faster(current_limits().sm_version, plan, args.is_layer, row_bytes,
                         bytes / row_bytes);
}

int64_t row_dims_of(const Norm& args) {
  return args.input.dim() - static_cast<int64_t>(args.normalized_shape.size());
}

NormOfRows rows_of(const Norm& args) {
  return {name_of(args),     args.input, args.residual, args.weight,       args.bias,
          row_dims_of(args), args.eps,   args.is_layer, args.zero_centered};
}

NormResults norm_cuda(const NormForward& forward) {
  const auto& [args, with_stats] = forward;
  const auto& input = args.input;
  check_norm(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(name_of(args), input.get_device());
  check_cuda_dtype(args);
  const auto row_dims = static_cast<size_t>(row_dims_of(args));
  const int64_t rows = c10::multiply_integers(input.sizes().slice(0, row_dims));
  const at::Tensor out = empty(input.sizes(), input.scalar_type(), input.device());
  at::Tensor sum, mean, rstd;
  if (args.residual) sum = empty(input.sizes(), input.scalar_type(), input.device());
  if (with_stats) rstd = empty({rows}, at::kFloat, input.device());
  if (with_stats && args.is_layer) mean = empty({rows}, at::kFloat, input.device());
  if (input.numel() == 0) {
    // nothing to compute
  } else if (is_exact()) {
    Norm of_sum = args;
    if (args.residual) of_sum.input = at::add_out(sum, input, *args.residual);
    run_forward(of_sum, name_of(args), out, mean, rstd, /*is_must=*/true);
  } else if (!is_for_cudnn(args, with_stats ? NormPlan::kTraining : NormPlan::kInference,
                           std::nullopt) ||
             !run_forward(args, name_of(args), out, mean, rstd, /*is_must=*/false)) {
    norm_rows(rows_of(args), out, sum, mean, rstd);
  }
  return {out, or_none(sum, input, input.scalar_type()), or_none(mean, input, at::kFloat),
          or_none(rstd, input, at::kFloat)};
}

NormGradients norm_backward_cuda(const NormBackward& backward) {
  const auto& [grad_out, grad_sum, saved, output_mask] = backward;
  const auto& [input, normalized_shape, weight, mean, rstd, is_layer, zero_centered] = saved;
  const Norm args = saved.norm();
  check_norm_backward(backward);
  check_cuda_dtype(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const auto dtype = weight ? weight->scalar_type() : input.scalar_type();
  const auto sizes = shape_of(args);
  at::Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) grad_input = empty(input.sizes(), input.scalar_type(), input.device());
  if (output_mask[1]) grad_weight = empty(sizes, dtype, input.device());
  if (output_mask[2]) grad_bias = empty(sizes, dtype, input.device());
  if (input.numel() == 0) {
    if (grad_weight.defined()) grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
  } else if (is_exact()) {
    run_backward(args, grad_out, mean, rstd, grad_input, grad_weight, grad_bias, /*is_must=*/true);
    if (grad_sum && grad_input.defined()) grad_input.add_(*grad_sum);
  } else if (grad_sum || !is_for_cudnn(args, NormPlan::kBackward, grad_out) ||
             !run_backward(args, grad_out, mean, rstd, grad_input, grad_weight, grad_bias,
                           /*is_must=*/false)) {
    norm_rows_backward(rows_of(args), grad_out, grad_sum.value_or(at::Tensor()), mean, rstd,
                       grad_input, grad_weight, grad_bias);
  }
  return {or_none(grad_input, input, at::kFloat), or_none(grad_weight, input, at::kFloat),
          or_none(grad_bias, input, at::kFloat)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_norm", cudnn_ops::kernel<cudnn_ops::norm_cuda>);
  m.impl("_norm_backward", cudnn_ops::kernel<cudnn_ops::norm_backward_cuda>);
}

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def("_norm_limit_shared_memory(int bytes) -> ()", cudnn_ops::limit_shared_memory);
}
