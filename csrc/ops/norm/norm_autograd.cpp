// Layer norm and RMS norm: their derivative.

#include "ops/autograd_node.h"
#include "ops/norm/norm.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kNormBackward[] = "NormBackward";

const Operator<NormGradients, NormBackward>& norm_backward_op() {
  static const Operator<NormGradients, NormBackward> op("cudnn_ops::_norm_backward");
  return op;
}

struct NormHistory {
  NormSaved saved;
  bool has_residual = false;
  CUDNN_OPS_FIELDS(saved, has_residual)
};

variable_list norm_gradients(const variable_list& grads, const Wanted<4>& wanted,
                             const NormHistory& history) {
  const auto& [saved, has_residual] = history;
  variable_list result(4);
  if (!grads[0].defined()) {
    result[0] = result[1] = grads[1];
    const at::Tensor& like = saved.weight ? *saved.weight : saved.input;
    for (const size_t i : {2, 3}) {
      if (wanted[i]) result[i] = like.new_zeros_symint(saved.normalized_shape);
    }
    return result;
  }
  NormBackward args{
      grads[0], {}, saved, {wanted[0] || wanted[1], /*weight=*/wanted[2], /*bias=*/wanted[3]}};
  if (has_residual && grads[1].defined()) args.grad_sum = grads[1];
  args.saved.mean = saved.mean.contiguous();
  args.saved.rstd = saved.rstd.contiguous();
  const auto [grad_input, grad_weight, grad_bias] = norm_backward_op().call(args);
  if (args.output_mask[0]) result[0] = grad_input;
  if (args.output_mask[0] && has_residual) result[1] = grad_input;
  if (wanted[2]) result[2] = grad_weight;
  if (wanted[3]) result[3] = grad_bias;
  return result;
}

using NormBackwardNode = BackwardNode<kNormBackward, norm_gradients>;

NormResults norm_autograd(c10::DispatchKeySet keys, const NormForward& args) {
  const auto& norm = args.norm;
  refuse_forward_mode(name_of(norm), norm);
  const bool requires_grad =
      torch::autograd::compute_requires_grad(norm.input, norm.residual, norm.weight, norm.bias);
  if (!requires_grad) return call_below_autograd(norm_op(), keys, args);
  const NormResults results = call_below_autograd(norm_op(), keys, norm, /*with_stats=*/true);
  const auto& [out, sum, mean, rstd] = results;
  auto edges =
      torch::autograd::collect_next_edges(norm.input, norm.residual, norm.weight, norm.bias);
  const at::Tensor& input = norm.residual ? sum : norm.input;
  const Borrowed<NormHistory> history(input, norm.normalized_shape, norm.weight, mean, rstd,
                                      norm.is_layer, norm.zero_centered, norm.residual.has_value());
  if (norm.residual) {
    set_derivative<NormBackwardNode>(std::move(edges), {out, sum}, *history);
  } else {
    set_derivative<NormBackwardNode>(std::move(edges), {out}, *history);
  }
  return results;
}

NormGradients norm_backward_autograd(c10::DispatchKeySet keys, const NormBackward& args) {
  return without_derivative(
      norm_backward_op(), keys, args,
      args.saved.is_layer ? "cudnn_ops.layer_norm" : "cudnn_ops.rms_norm",
      "cudnn_ops: double backward of a norm is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_norm", cudnn_ops::kernel<cudnn_ops::norm_autograd>);
  m.impl("_norm_backward", cudnn_ops::kernel<cudnn_ops::norm_backward_autograd>);
}
