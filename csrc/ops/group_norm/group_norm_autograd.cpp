// Group norm: its derivative.

#include "ops/autograd_node.h"
#include "ops/group_norm/group_norm.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kGroupNormBackward[] = "GroupNormBackward";

const Operator<GroupNormGradients, GroupNormBackward>& group_norm_backward_op() {
  static const Operator<GroupNormGradients, GroupNormBackward> op(
      "cudnn_ops::_group_norm_backward");
  return op;
}

struct GroupNormHistory {
  GroupNormSaved saved;
  bool has_residual = false;
  CUDNN_OPS_FIELDS(saved, has_residual)
};

variable_list group_norm_gradients(const variable_list& grads, const Wanted<4>& wanted,
                                   const GroupNormHistory& history) {
  const auto& [saved, has_residual] = history;
  variable_list result(4);
  if (!grads[0].defined()) {
    result[0] = result[1] = grads[1];
    if (wanted[2]) result[2] = at::zeros_like(*saved.weight);
    if (wanted[3]) result[3] = at::zeros_like(*saved.bias);
    return result;
  }
  GroupNormBackward args{
      grads[0], {}, saved, {wanted[0] || wanted[1], /*weight=*/wanted[2], /*bias=*/wanted[3]}};
  if (has_residual && grads[1].defined()) args.grad_sum = grads[1];
  args.saved.mean = saved.mean.contiguous();
  args.saved.rstd = saved.rstd.contiguous();
  const auto [grad_input, grad_weight, grad_bias] = group_norm_backward_op().call(args);
  if (args.output_mask[0]) result[0] = grad_input;
  if (args.output_mask[0] && has_residual) result[1] = grad_input;
  if (wanted[2]) result[2] = grad_weight;
  if (wanted[3]) result[3] = grad_bias;
  return result;
}

using GroupNormBackwardNode = BackwardNode<kGroupNormBackward, group_norm_gradients>;

GroupNormResults group_norm_autograd(c10::DispatchKeySet keys, const GroupNormForward& args) {
  const auto& norm = args.norm;
  refuse_forward_mode(name_of(norm), norm);
  const bool requires_grad =
      torch::autograd::compute_requires_grad(norm.input, norm.residual, norm.weight, norm.bias);
  if (!requires_grad) return call_below_autograd(group_norm_op(), keys, args);
  const GroupNormResults results =
      call_below_autograd(group_norm_op(), keys, norm, /*with_stats=*/true);
  const auto& [out, sum, mean, rstd] = results;
  auto edges =
      torch::autograd::collect_next_edges(norm.input, norm.residual, norm.weight, norm.bias);
  const at::Tensor& input = norm.residual ? sum : norm.input;
  const Borrowed<GroupNormHistory> history(input, norm.num_groups, norm.weight, norm.bias, mean,
                                           rstd, norm.activation, norm.residual.has_value());
  if (norm.residual) {
    set_derivative<GroupNormBackwardNode>(std::move(edges), {out, sum}, *history);
  } else {
    set_derivative<GroupNormBackwardNode>(std::move(edges), {out}, *history);
  }
  return results;
}

GroupNormGradients group_norm_backward_autograd(c10::DispatchKeySet keys,
                                                const GroupNormBackward& args) {
  return without_derivative(
      group_norm_backward_op(), keys, args, "cudnn_ops.group_norm",
      "cudnn_ops: double backward of a norm is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_group_norm", cudnn_ops::kernel<cudnn_ops::group_norm_autograd>);
  m.impl("_group_norm_backward", cudnn_ops::kernel<cudnn_ops::group_norm_backward_autograd>);
}
