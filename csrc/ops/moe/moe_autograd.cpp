// Mixture of experts: the derivatives. That of a permutation is a sum of rows, and that of a sum
// copies; both are operators here already.

#include "ops/autograd_node.h"
#include "ops/moe/moe.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kMoePermuteBackward[] = "MoePermuteBackward";
constexpr char kMoeCombineBackward[] = "MoeCombineBackward";
constexpr char kGroupedLinearBackward[] = "GroupedLinearBackward";

const Operator<MoeGradients, MoeCombineBackward>& moe_combine_backward_op() {
  static const Operator<MoeGradients, MoeCombineBackward> op("cudnn_ops::_moe_combine_backward");
  return op;
}

const Operator<MoeGradients, GroupedLinearBackward>& grouped_linear_backward_op() {
  static const Operator<MoeGradients, GroupedLinearBackward> op(
      "cudnn_ops::_grouped_linear_backward");
  return op;
}

struct Positions {
  at::Tensor positions;
  CUDNN_OPS_FIELDS(positions)
};

variable_list permute_gradients(const variable_list& grads, const Wanted<1>& /*wanted*/,
                                const Positions& saved) {
  return {moe_combine_op().call_with(grads[0], saved.positions, OptionalTensor())};
}

using MoePermuteBackwardNode = BackwardNode<kMoePermuteBackward, permute_gradients>;

MoePermuted permute_autograd(c10::DispatchKeySet keys, const MoePermute& args) {
  refuse_forward_mode("cudnn_ops.moe_permute", args);
  const MoePermuted results = call_below_autograd(moe_permute_op(), keys, args);
  if (torch::autograd::compute_requires_grad(args.input)) {
    const auto& [rows, offsets, positions] = results;
    set_derivative<MoePermuteBackwardNode>(torch::autograd::collect_next_edges(args.input), {rows},
                                           Positions{positions});
  }
  return results;
}

// Without what no gradient is computed from.
struct Combined {
  OptionalTensor rows;
  at::Tensor positions;
  OptionalTensor weights;
  CUDNN_OPS_FIELDS(rows, positions, weights)
};

variable_list combine_gradients(const variable_list& grads, const Wanted<2>& wanted,
                                const Combined& saved) {
  return only_wanted(wanted, moe_combine_backward_op().call_with(
                                 grads[0], saved.rows, saved.positions, saved.weights, wanted));
}

using MoeCombineBackwardNode = BackwardNode<kMoeCombineBackward, combine_gradients>;

at::Tensor combine_autograd(c10::DispatchKeySet keys, const MoeCombine& args) {
  refuse_forward_mode("cudnn_ops.moe_combine", args);
  const at::Tensor out = call_below_autograd(moe_combine_op(), keys, args);
  if (torch::autograd::compute_requires_grad(args.rows, args.weights)) {
    const bool has_weight_gradient = torch::autograd::compute_requires_grad(args.weights);
    const OptionalTensor rows = has_weight_gradient ? OptionalTensor(args.rows) : std::nullopt;
    set_derivative<MoeCombineBackwardNode>(
        torch::autograd::collect_next_edges(args.rows, args.weights), {out},
        Combined{rows, args.positions, args.weights});
  }
  return out;
}

MoeGradients combine_backward_autograd(c10::DispatchKeySet keys, const MoeCombineBackward& args) {
  return without_derivative(
      moe_combine_backward_op(), keys, args, "cudnn_ops.moe_combine backward",
      "cudnn_ops: double backward of moe_combine is not available; compute that part with torch's "
      "own operators");
}

variable_list grouped_linear_gradients(const variable_list& grads, const Wanted<2>& wanted,
                                       const GroupedLinear& saved) {
  return only_wanted(wanted, grouped_linear_backward_op().call_with(
                                 grads[0], saved.input, saved.weight, saved.offsets, wanted));
}

using GroupedLinearBackwardNode = BackwardNode<kGroupedLinearBackward, grouped_linear_gradients>;

at::Tensor grouped_linear_autograd(c10::DispatchKeySet keys, const GroupedLinear& args) {
  refuse_forward_mode("cudnn_ops.grouped_linear", args);
  const at::Tensor out = call_below_autograd(grouped_linear_op(), keys, args);
  if (torch::autograd::compute_requires_grad(args.input, args.weight)) {
    set_derivative<GroupedLinearBackwardNode>(
        torch::autograd::collect_next_edges(args.input, args.weight), {out}, args);
  }
  return out;
}

MoeGradients grouped_linear_backward_autograd(c10::DispatchKeySet keys,
                                              const GroupedLinearBackward& args) {
  return without_derivative(
      grouped_linear_backward_op(), keys, args, "cudnn_ops.grouped_linear backward",
      "cudnn_ops: double backward of grouped_linear is not available; compute that part with "
      "torch's own operators");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("_moe_permute", kernel<permute_autograd>);
  m.impl("_moe_combine", kernel<combine_autograd>);
  m.impl("_moe_combine_backward", kernel<combine_backward_autograd>);
  m.impl("_grouped_linear", kernel<grouped_linear_autograd>);
  m.impl("_grouped_linear_backward", kernel<grouped_linear_backward_autograd>);
}
