#include "ops/linear/linear_steps.h"
#include "ops/linear/lt_product.h"

#include "kernels/conv_epilogue.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>

namespace cudnn_ops {
namespace {

at::Tensor empty(int64_t rows, int64_t columns, const at::Tensor& like) {
  return at::detail::empty_cuda({rows, columns}, like.scalar_type(), like.device(), std::nullopt);
}

LinearEngine engine_of(LinearStep step, Activation activation, const at::Tensor& left,
                       const at::Tensor& out) {
  return choose_engine(current_limits().sm_version,
                       {step, activation, out.size(0), out.size(1), left.size(1)});
}

// By torch's own product, which follows its flags for TF32.
void product(const at::Tensor& left, const at::Tensor& right, const OptionalTensor& bias,
             at::Tensor out) {
  if (bias) {
    at::addmm_out(out, *bias, left, right);
  } else {
    at::mm_out(out, left, right);
  }
}

// In float64, of which there is no kernel of ours.
void run_rest_by_torch(const LinearStepCall& call, const at::Tensor& before) {
  at::Tensor result = activate(before, call.activation);
  if (call.keeps_slope) {
    before.copy_(activation_gradient(at::ones_like(before), before, call.activation));
  }
  if (call.residual) result = at::add(result, *call.residual);
  at::Tensor(call.out).copy_(result);
}

bool run_layer_by_epilogue(const LinearStepCall& call, const at::Tensor& weight,
                           const OptionalTensor& bias) {
  const auto kind = call.activation;
  const bool is_linear = kind == Activation::kNone;
  // A residual is added before an activation, of which only GELU's input is given out.
  if ((call.residual && !is_linear) || (call.before.defined() && kind != Activation::kGeluTanh) ||
      call.keeps_slope || !has_lt_epilogue(call.out.scalar_type(), kind) ||
      call.input.size(1) == 0) {
    return false;
  }
  // Without the epilogue a residual costs a pass of its own.
  if (!call.residual && engine_of(call.step(), kind, call.input, call.out) == LinearEngine::kOurs) {
    return false;
  }
  OptionalTensor added;
  if (call.residual) added = call.residual->contiguous();
  LtProduct product{call.input, weight, call.out, bias, added, kind, call.before};
  return run_lt(product);
}

}  // namespace

void run_layer(const LinearStepCall& call) {
  const at::Tensor weight = call.weight.t();
  OptionalTensor bias;
  if (call.bias) bias = call.bias->contiguous();
  const bool is_bare = call.activation == Activation::kNone && !call.residual;
  // Without anything behind it, the product is torch's own.
  if ((bias || !is_bare) && run_layer_by_epilogue(call, weight, bias)) return;
  const at::Tensor& before = call.before.defined() ? call.before : call.out;
  product(call.input, weight, bias, before);
  if (is_bare) return;
  if (call.out.scalar_type() == at::kDouble) return run_rest_by_torch(call, before);
  OptionalTensor residual;
  if (call.residual) residual = call.residual->contiguous();
  const at::Tensor slope = call.keeps_slope ? before : at::Tensor();
  conv_epilogue_forward(before, /*bias=*/{}, residual, call.activation, slope, call.out,
                        ResidualPlace::kAfter, BeforeHolds::kSlope);
}

at::Tensor through_activation(const at::Tensor& grad_out, const OptionalTensor& saved,
                              Activation activation, const at::Tensor& grad_bias) {
  const bool is_linear = activation == Activation::kNone;
  if (is_linear && !grad_bias.defined()) return grad_out;
  if (grad_out.scalar_type() == at::kDouble) {
    const at::Tensor grad =
        is_linear ? grad_out : activation_gradient(grad_out, *saved, activation);
    if (grad_bias.defined()) at::Tensor(grad_bias).copy_(grad.sum(0));
    return grad;
  }
  const at::Tensor of_out = grad_out.contiguous();
  if (is_linear) {
    conv_epilogue_backward(of_out, /*saved=*/{}, activation, at::Tensor(), grad_bias);
    return grad_out;
  }
  const at::Tensor grad = empty(of_out.size(0), of_out.size(1), of_out);
  conv_epilogue_backward(of_out, saved->contiguous(), activation, grad, grad_bias);
  return grad;
}

at::Tensor into_hidden(const at::Tensor& grad_out, const at::Tensor& weight,
                       const OptionalTensor& saved, Activation activation,
                       const at::Tensor& grad_bias) {
  const at::Tensor grad = empty(grad_out.size(0), weight.size(1), grad_out);
  if (activation == Activation::kGeluTanh && grad_out.size(1) > 0) {
    const auto engine = engine_of(LinearStep::kHiddenGradient, activation, grad_out, grad);
    LtProduct product{grad_out, weight, grad};
    product.slope_of = saved->contiguous();
    if (engine == LinearEngine::kEpilogueSum) product.column_sums = grad_bias;
    if (engine != LinearEngine::kOurs && run_lt(product)) {
      if (product.column_sums.defined()) return grad;
      return through_activation(grad, /*saved=*/{}, Activation::kNone, grad_bias);
    }
  }
  product(grad_out, weight, /*bias=*/{}, grad);
  if (grad.scalar_type() == at::kDouble || activation == Activation::kNone) {
    return through_activation(grad, saved, activation, grad_bias);
  }
  conv_epilogue_backward(grad, saved->contiguous(), activation, grad, grad_bias);
  return grad;
}

void input_gradient(const at::Tensor& grad, const at::Tensor& weight,
                    const at::Tensor& grad_input) {
  product(grad, weight, /*bias=*/{}, grad_input);
}

bool sums_with_weight(const at::Tensor& grad, const at::Tensor& input) {
  const LinearProblem problem{LinearStep::kWeightGradient, Activation::kNone, grad.size(1),
                              input.size(1), grad.size(0)};
  return input.size(1) > 0 &&
         choose_engine(current_limits().sm_version, problem) == LinearEngine::kEpilogueSum;
}

void weight_gradient(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& grad_weight,
                     const at::Tensor& grad_bias) {
  if (grad_weight.defined() && grad_bias.defined() && sums_with_weight(grad, input)) {
    LtProduct product{grad.t(), input, grad_weight};
    product.row_sums = grad_bias;
    if (run_lt(product)) return;
  }
  if (grad_bias.defined()) through_activation(grad, /*saved=*/{}, Activation::kNone, grad_bias);
  if (grad_weight.defined()) product(grad.t(), input, /*bias=*/{}, grad_weight);
}

}  // namespace cudnn_ops
