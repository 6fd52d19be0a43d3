// Linear layers with their epilogue: their derivatives.

#include "ops/autograd_node.h"
#include "ops/linear/linear.h"
#ifdef CUDNN_OPS_WITH_CUDA
#include "ops/linear/linear_plans.h"
#endif

#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr char kLinearBackward[] = "LinearBackward";
constexpr char kMlpBackward[] = "MlpBackward";

const Operator<LinearGradients, LinearMaskedBackward>& linear_backward_op() {
  static const Operator<LinearGradients, LinearMaskedBackward> op("cudnn_ops::_linear_backward");
  return op;
}

const Operator<MlpGradients, MlpMaskedBackward>& mlp_backward_op() {
  static const Operator<MlpGradients, MlpMaskedBackward> op("cudnn_ops::_mlp_backward");
  return op;
}

variable_list linear_gradients(const variable_list& grads, const Wanted<4>& wanted,
                               const LinearSaved& saved) {
  const Wanted<3> computed{wanted[0], wanted[1], wanted[2]};
  variable_list result(3);
  if (std::any_of(computed.begin(), computed.end(), [](bool one) { return one; })) {
    result = only_wanted(computed, linear_backward_op().call({{grads[0], saved}, computed}));
  }
  result.push_back(wanted[3] ? grads[0] : at::Tensor());
  return result;
}

using LinearBackwardNode = BackwardNode<kLinearBackward, linear_gradients>;

LinearResults linear_autograd(c10::DispatchKeySet keys, const LinearForward& args) {
  const Linear& linear = args.linear;
  refuse_forward_mode("cudnn_ops.linear", linear);
  const bool requires_grad = torch::autograd::compute_requires_grad(linear.input, linear.weight,
                                                                    linear.bias, linear.residual);
  if (!requires_grad) return call_below_autograd(linear_op(), keys, args);
  const Activation kind = linear.kind();
  const bool by_before = needs_before(kind, linear.residual.has_value());
  const LinearResults results =
      call_below_autograd(linear_op(), keys, linear, args.with_before || by_before);
  const auto& [out, before] = results;
  OptionalTensor of_activation;
  if (by_before) {
    of_activation = before;
  } else if (kind != Activation::kNone) {
    of_activation = out;
  }
  const Borrowed<LinearSaved> saved(linear.input, linear.weight, of_activation, linear.activation);
  set_derivative<LinearBackwardNode>(torch::autograd::collect_next_edges(
                                         linear.input, linear.weight, linear.bias, linear.residual),
                                     {out}, *saved);
  return results;
}

LinearGradients linear_backward_autograd(c10::DispatchKeySet keys,
                                         const LinearMaskedBackward& args) {
  return without_derivative(
      linear_backward_op(), keys, args, "cudnn_ops.linear backward",
      "cudnn_ops: double backward of linear is not available; compute that part with "
      "torch.nn.functional");
}

variable_list mlp_gradients(const variable_list& grads, const Wanted<5>& wanted,
                            const MlpSaved& saved) {
  return only_wanted(wanted, mlp_backward_op().call({{grads[0], saved}, wanted}));
}

using MlpBackwardNode = BackwardNode<kMlpBackward, mlp_gradients>;

// Where the caller says so; or where it is faster, of a layer whose rows come again.
bool is_slope_kept(const MlpForward& args) {
  const Mlp& mlp = args.mlp;
  if (mlp.gated || !needs_before(mlp.kind(), /*has_residual=*/false)) return false;
  if (keep_at(args.keep) == Keep::kSlope) return true;
#ifdef CUDNN_OPS_WITH_CUDA
  return mlp.input.is_cuda() && keeps_slope_by_plan(mlp);
#else
  return false;
#endif
}

MlpResults mlp_autograd(c10::DispatchKeySet keys, const MlpForward& args) {
  const Mlp& mlp = args.mlp;
  refuse_forward_mode("cudnn_ops.mlp", mlp);
  const bool requires_grad = torch::autograd::compute_requires_grad(
      mlp.input, mlp.weight1, mlp.bias1, mlp.weight2, mlp.bias2);
  if (!requires_grad) return call_below_autograd(mlp_op(), keys, args);
  const Keep keep = is_slope_kept(args) ? Keep::kSlope : Keep::kInput;
  const MlpResults results = call_below_autograd(mlp_op(), keys, mlp, static_cast<int64_t>(keep));
  const auto& [out, hidden, before] = results;
  MlpSaved saved{mlp.input, mlp.weight1, mlp.weight2, hidden, {}, mlp.activation, mlp.gated};
  if (needs_before(mlp)) saved.before = before;
  if (keep == Keep::kSlope) saved.activation = static_cast<int64_t>(Activation::kSlope);
  set_derivative<MlpBackwardNode>(torch::autograd::collect_next_edges(
                                      mlp.input, mlp.weight1, mlp.bias1, mlp.weight2, mlp.bias2),
                                  {out}, saved);
  return results;
}

MlpGradients mlp_backward_autograd(c10::DispatchKeySet keys, const MlpMaskedBackward& args) {
  return without_derivative(
      mlp_backward_op(), keys, args, "cudnn_ops.mlp backward",
      "cudnn_ops: double backward of mlp is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_linear", cudnn_ops::kernel<cudnn_ops::linear_autograd>);
  m.impl("_linear_backward", cudnn_ops::kernel<cudnn_ops::linear_backward_autograd>);
  m.impl("_mlp", cudnn_ops::kernel<cudnn_ops::mlp_autograd>);
  m.impl("_mlp_backward", cudnn_ops::kernel<cudnn_ops::mlp_backward_autograd>);
}
