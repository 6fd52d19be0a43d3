// Batch norm: its derivative.

#include "ops/autograd_node.h"
#include "ops/batch_norm/batch_norm.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBatchNormBackward[] = "BatchNormBackward";

const Operator<BatchNormGradients, BatchNormBackward>& batch_norm_backward_op() {
  static const Operator<BatchNormGradients, BatchNormBackward> op(
      "cudnn_ops::_batch_norm_backward");
  return op;
}

// In training `mean` and `rstd` are those of the batch, else the running mean and variance.
struct BatchNormHistory {
  BatchNormSaved saved;
  double eps = 0;
  bool params_in_input_dtype = false;
  CUDNN_OPS_FIELDS(saved, eps, params_in_input_dtype)
};

// Of input, weight, bias and residual. Where weight and bias differ in dtype, the engine casts.
variable_list batch_norm_gradients(const variable_list& grads, const Wanted<4>& wanted,
                                   const BatchNormHistory& history) {
  BatchNormSaved saved = history.saved;
  const auto dtype = stats_dtype(saved.input);
  if (saved.training) {
    saved.mean = saved.mean.contiguous();
    saved.rstd = saved.rstd.contiguous();
  } else {
    saved.mean = saved.mean.to(dtype).contiguous();
    saved.rstd = saved.rstd.to(dtype).contiguous().add(history.eps).rsqrt();
  }
  // Without an activation the residual's is the output's.
  const bool passes_on = !saved.has_relu() && wanted[3];
  Wanted<4> computed = wanted;
  if (passes_on) computed[3] = false;
  variable_list result(4);
  if (computed[0] || computed[1] || computed[2] || computed[3]) {
    result = only_wanted(computed, batch_norm_backward_op().call(
                                       {grads[0], saved, computed, history.params_in_input_dtype}));
  }
  if (passes_on) result[3] = grads[0];
  return result;
}

using BatchNormBackwardNode = BackwardNode<kBatchNormBackward, batch_norm_gradients>;

bool has_gradient(const BatchNorm& args) {
  return torch::autograd::compute_requires_grad(args.input, args.weight, args.bias, args.residual);
}

void set_batch_norm_derivative(const BatchNorm& args, const at::Tensor& out, const at::Tensor& mean,
                               const at::Tensor& rstd_or_var, bool training) {
  OptionalTensor bias, of_relu;
  if (is_relu_of_input(args, training)) {
    bias = args.bias;
  } else if (args.has_relu()) {
    of_relu = out;
  }
  const auto dtype = args.input.scalar_type();
  const auto is_of_it = [dtype](const OptionalTensor& vector) {
    return !vector || vector->scalar_type() == dtype;
  };
  const Borrowed<BatchNormHistory> history(args.input, args.weight, bias, of_relu, mean,
                                           rstd_or_var, training, args.activation, args.eps,
                                           is_of_it(args.weight) && is_of_it(args.bias));
  set_derivative<BatchNormBackwardNode>(
      torch::autograd::collect_next_edges(args.input, args.weight, args.bias, args.residual), {out},
      *history);
}

BatchNormResults batch_norm_training_autograd(c10::DispatchKeySet keys, const BatchNorm& args) {
  refuse_forward_mode(kBatchNorm, args);
  BatchNormResults results = call_below_autograd(batch_norm_training_op(), keys, args);
  // What was saved of them before is no longer there.
  for (const auto* statistic : {&args.running_mean, &args.running_var}) {
    if (*statistic) torch::autograd::impl::bump_version(**statistic);
  }
  const auto& [out, mean, rstd] = results;
  if (has_gradient(args)) set_batch_norm_derivative(args, out, mean, rstd, /*training=*/true);
  return results;
}

at::Tensor batch_norm_inference_autograd(c10::DispatchKeySet keys, const BatchNorm& args) {
  refuse_forward_mode(kBatchNorm, args);
  const at::Tensor out = call_below_autograd(batch_norm_inference_op(), keys, args);
  if (has_gradient(args)) {
    set_batch_norm_derivative(args, out, *args.running_mean, *args.running_var,
                              /*training=*/false);
  }
  return out;
}

BatchNormGradients batch_norm_backward_autograd(c10::DispatchKeySet keys,
                                                const BatchNormBackward& args) {
  return without_derivative(
      batch_norm_backward_op(), keys, args, kBatchNorm,
      "cudnn_ops: double backward of a norm is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("_batch_norm_training", kernel<batch_norm_training_autograd>);
  m.impl("_batch_norm_inference", kernel<batch_norm_inference_autograd>);
  m.impl("_batch_norm_backward", kernel<batch_norm_backward_autograd>);
}
