// Linear layers with their epilogue on CUDA.

#include "ops/linear/linear_plans.h"
#include "ops/only_kernels.h"
#include "ops/or_none_cuda.h"

#include "graph/cuda_call.h"
#include "kernels/gated.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/mul.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kLinear = "cudnn_ops.linear";
constexpr const char* kMlp = "cudnn_ops.mlp";
constexpr const char* kMlpBackward = "cudnn_ops.mlp backward";

at::Tensor empty(c10::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, like.scalar_type(), like.device(), std::nullopt);
}

// With the input's rows and another number of columns.
at::Tensor empty_rows(const at::Tensor& input, int64_t columns) {
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  return empty(sizes, input);
}

template <size_t count>
bool any_of(const std::array<bool, count>& mask, std::initializer_list<size_t> places) {
  for (const size_t place : places) {
    if (mask[place]) return true;
  }
  return false;
}

// Zeros where it is defined: of a call without rows or columns.
void fill_with_zeros(std::initializer_list<at::Tensor> tensors) {
  for (auto tensor : tensors) {
    if (tensor.defined()) tensor.zero_();
  }
}

// By whatever was measured to be the fastest.
void layer(const char* op, const LinearStepCall& call) {
  if (!run_layer_by_plan(op, call)) run_layer(call);
}

LinearResults linear_cuda(const LinearForward& forward) {
  const auto& [args, with_before] = forward;
  const auto& [input, weight, bias, residual, activation] = args;
  check_linear(args);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(kLinear, input.get_device());
  const OnlyKernels guard;
  const Activation kind = args.kind();
  const at::Tensor out = empty_rows(input, weight.size(0));
  at::Tensor before;
  if (with_before && needs_before(kind, residual.has_value())) before = empty(out.sizes(), input);
  if (out.numel() > 0) {
    layer(kLinear, {as_matrix(input), weight, bias, as_matrix(residual), kind, as_matrix(out),
                    as_matrix(before)});
  }
  return {out, or_none(before, input, input.scalar_type())};
}

LinearGradients linear_backward_cuda(const LinearMaskedBackward& masked) {
  const auto& [backward, output_mask] = masked;
  const auto& [input, weight, saved, activation] = backward.forward;
  check_linear_backward(backward);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80("cudnn_ops.linear backward", input.get_device());
  const OnlyKernels guard;
  at::Tensor of_input, of_weight, of_bias;
  if (output_mask[0]) of_input = empty(input.sizes(), input);
  if (output_mask[1]) of_weight = empty(weight.sizes(), weight);
  if (output_mask[2]) of_bias = empty({weight.size(0)}, weight);
  const Activation kind = activation_at(activation);
  if (backward.grad_out.numel() == 0 || input.numel() == 0) {
    // Without inputs, the bias still has a gradient, below.
    fill_with_zeros({of_input, of_weight, of_bias});
  }
  if (backward.grad_out.numel() > 0) {
    const bool is_linear = kind == Activation::kNone;
    // What is left to do for the bias is done with the weight.
    const at::Tensor grad = through_activation(as_matrix(backward.grad_out), as_matrix(saved), kind,
                                               is_linear ? at::Tensor() : of_bias);
    if (of_input.numel() > 0) input_gradient(grad, weight, as_matrix(of_input));
    weight_gradient(grad, as_matrix(input), of_weight, is_linear ? of_bias : at::Tensor());
  }
  const auto dtype = input.scalar_type();
  return {or_none(of_input, input, dtype), or_none(of_weight, input, dtype),
          or_none(of_bias, input, dtype)};
}

GatedActivation gated_of(Activation activation) {
  switch (activation) {
    case Activation::kGelu: return GatedActivation::kGelu;
    case Activation::kGeluTanh: return GatedActivation::kGeluTanh;
    default: return GatedActivation::kSilu;
  }
}

// act(gate) * up, of which gate and up are the halves of `before`.
void gate(const at::Tensor& before, Activation activation, const at::Tensor& hidden) {
  const int64_t columns = hidden.size(1);
  const at::Tensor first = before.narrow(1, 0, columns);
  const at::Tensor second = before.narrow(1, columns, columns);
  if (before.scalar_type() == at::kDouble) {
    at::Tensor(hidden).copy_(at::mul(activate(first, activation), second));
  } else {
    gated_forward(first, second, gated_of(activation), hidden);
  }
}

// The gradients of both halves, in one matrix.
at::Tensor gate_gradient(const at::Tensor& grad_hidden, const at::Tensor& before,
                         Activation activation) {
  const int64_t columns = grad_hidden.size(1);
  const at::Tensor grad = empty(before.sizes(), before);
  at::Tensor of_first = grad.narrow(1, 0, columns);
  at::Tensor of_second = grad.narrow(1, columns, columns);
  const at::Tensor first = before.narrow(1, 0, columns);
  const at::Tensor second = before.narrow(1, columns, columns);
  if (before.scalar_type() == at::kDouble) {
    of_first.copy_(activation_gradient(at::mul(grad_hidden, second), first, activation));
    of_second.copy_(at::mul(grad_hidden, activate(first, activation)));
  } else {
    gated_backward(grad_hidden, first, second, gated_of(activation), of_first, of_second);
  }
  return grad;
}

MlpResults mlp_cuda(const MlpForward& forward) {
  const auto& [args, keep_number] = forward;
  const auto& [input, weight1, bias1, weight2, bias2, activation, gated] = args;
  check_mlp_forward(forward);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(kMlp, input.get_device());
  const OnlyKernels guard;
  const Activation kind = args.kind();
  const Keep keep = keep_at(keep_number);
  const bool is_saved = keep != Keep::kNothing;
  const at::Tensor out = empty_rows(input, weight2.size(0));
  const at::Tensor hidden = empty_rows(input, weight2.size(1));
  at::Tensor before;
  if (gated || (is_saved && needs_before(args))) before = empty_rows(input, weight1.size(0));
  if (hidden.numel() > 0) {
    const at::Tensor x = as_matrix(input), first = as_matrix(before);
    const at::Tensor second = as_matrix(hidden);
    if (gated) {
      layer(kMlp, {x, weight1, bias1, /*residual=*/{}, Activation::kNone, first, at::Tensor()});
      gate(first, kind, second);
    } else {
      layer(kMlp, {x, weight1, bias1, /*residual=*/{}, kind, second, first,
                   first.defined() && keep == Keep::kSlope});
    }
  }
  if (out.numel() > 0) {
    layer(kMlp, {as_matrix(hidden), weight2, bias2, /*residual=*/{}, Activation::kNone,
                 as_matrix(out), at::Tensor()});
  }
  const auto kept = [&](const at::Tensor& tensor) {
    return or_none(is_saved ? tensor : at::Tensor(), input, input.scalar_type());
  };
  return {out, kept(hidden), kept(before)};
}

MlpGradients mlp_backward_cuda(const MlpMaskedBackward& masked) {
  const auto& [backward, mask] = masked;
  const auto& [input, weight1, weight2, hidden, before, activation, gated] = backward.forward;
  check_mlp_backward(backward);
  const c10::cuda::CUDAGuard device_guard(input.device());
  graph::require_sm80(kMlpBackward, input.get_device());
  const OnlyKernels guard;
  const Activation kind = backward.forward.slope();
  at::Tensor of_input, of_weight1, of_bias1, of_weight2, of_bias2;
  if (mask[0]) of_input = empty(input.sizes(), input);
  if (mask[1]) of_weight1 = empty(weight1.sizes(), weight1);
  if (mask[2]) of_bias1 = empty({weight1.size(0)}, weight1);
  if (mask[3]) of_weight2 = empty(weight2.sizes(), weight2);
  if (mask[4]) of_bias2 = empty({weight2.size(0)}, weight2);
  if (backward.grad_out.numel() == 0 || hidden.numel() == 0 || input.numel() == 0) {
    fill_with_zeros({of_input, of_weight1, of_bias1, of_weight2, of_bias2});
  }
  if (backward.grad_out.numel() > 0) {
    const at::Tensor grad_out = as_matrix(backward.grad_out);
    weight_gradient(grad_out, as_matrix(hidden), of_weight2, of_bias2);
    if (hidden.numel() > 0 && any_of(mask, {0, 1, 2})) {
      at::Tensor grad;
      if (gated) {
        const at::Tensor of_hidden = into_hidden(grad_out, weight2, {}, Activation::kNone, {});
        grad = gate_gradient(of_hidden, as_matrix(*before), kind);
        weight_gradient(grad, as_matrix(input), of_weight1, of_bias1);
      } else {
        const at::Tensor saved = as_matrix(before ? *before : hidden), x = as_matrix(input);
        // A graph sums with atomics, which takes longer than the product of the weight's gradient
        // does for it.
        const bool is_sum_free =
            of_bias1.defined() && of_weight1.defined() && sums_with_weight(saved, x);
        grad = into_hidden_by_plan(kMlpBackward, grad_out, weight2, saved, kind,
                                   is_sum_free ? at::Tensor() : of_bias1);
        const bool is_sum_due = is_sum_free && grad.defined();
        if (!grad.defined()) grad = into_hidden(grad_out, weight2, saved, kind, of_bias1);
        weight_gradient(grad, x, of_weight1, is_sum_due ? of_bias1 : at::Tensor());
      }
      if (of_input.defined() && of_input.numel() > 0) {
        input_gradient(grad, weight1, as_matrix(of_input));
      }
    }
  }
  const auto dtype = input.scalar_type();
  return {or_none(of_input, input, dtype), or_none(of_weight1, input, dtype),
          or_none(of_bias1, input, dtype), or_none(of_weight2, input, dtype),
          or_none(of_bias2, input, dtype)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_linear", cudnn_ops::kernel<cudnn_ops::linear_cuda>);
  m.impl("_linear_backward", cudnn_ops::kernel<cudnn_ops::linear_backward_cuda>);
  m.impl("_mlp", cudnn_ops::kernel<cudnn_ops::mlp_cuda>);
  m.impl("_mlp_backward", cudnn_ops::kernel<cudnn_ops::mlp_backward_cuda>);
}
