// Adaptive layer norm and RMS norm: their derivative.

#include "ops/adaptive_norm/adaptive_norm.h"
#include "ops/autograd_node.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kAdaptiveNormBackward[] = "AdaptiveNormBackward";

const Operator<AdaptiveNormGradients, AdaptiveNormBackward>& adaptive_norm_backward_op() {
  static const Operator<AdaptiveNormGradients, AdaptiveNormBackward> op(
      "cudnn_ops::_adaptive_norm_backward");
  return op;
}

// Whether the shift's gradient is the output's: it has numbers of each row, and is added to it.
bool is_gradient_of_shift(const at::Tensor& grad_out, const AdaptiveNormSaved& saved) {
  const auto& shift = saved.shift;
  return grad_out.defined() && shift && shift->scalar_type() == grad_out.scalar_type() &&
         shift->sym_sizes() == grad_out.sym_sizes() && grad_out.is_contiguous();
}

variable_list adaptive_norm_gradients(const variable_list& grads,
                                      const Wanted<kAdaptiveNormInputs>& wanted,
                                      const AdaptiveNormSaved& saved) {
  AdaptiveNormBackward args{grads[0], {}, saved, wanted};
  if (!grads[0].defined()) args.grad_out = at::zeros_like(saved.input);
  if (saved.update && grads[1].defined()) args.grad_sum = grads[1];
  args.saved.mean = saved.mean.contiguous();
  args.saved.rstd = saved.rstd.contiguous();
  constexpr size_t kShift = 4;
  const bool has_shift = wanted[kShift] && is_gradient_of_shift(grads[0], saved);
  if (has_shift) args.output_mask[kShift] = false;
  variable_list found = only_wanted(wanted, adaptive_norm_backward_op().call(args));
  if (has_shift) found[kShift] = grads[0];
  return found;
}

using AdaptiveNormBackwardNode = BackwardNode<kAdaptiveNormBackward, adaptive_norm_gradients>;

AdaptiveNormResults adaptive_norm_autograd(c10::DispatchKeySet keys,
                                           const AdaptiveNormForward& args) {
  const auto& [input, update, gate, scale, shift, weight, bias, eps, is_layer] = args.norm;
  refuse_forward_mode(name_of(args.norm), args.norm);
  if (!torch::autograd::compute_requires_grad(input, update, gate, scale, shift, weight, bias)) {
    return call_below_autograd(adaptive_norm_op(), keys, args);
  }
  const AdaptiveNormResults results =
      call_below_autograd(adaptive_norm_op(), keys, args.norm, /*with_stats=*/true);
  const auto& [out, sum, mean, rstd] = results;
  auto edges = torch::autograd::collect_next_edges(input, update, gate, scale, shift, weight, bias);
  const Borrowed<AdaptiveNormSaved> saved(update ? sum : input, update, gate, scale, shift, weight,
                                          bias, mean, rstd, is_layer);
  if (update) {
    set_derivative<AdaptiveNormBackwardNode>(std::move(edges), {out, sum}, *saved);
  } else {
    set_derivative<AdaptiveNormBackwardNode>(std::move(edges), {out}, *saved);
  }
  return results;
}

AdaptiveNormGradients adaptive_norm_backward_autograd(c10::DispatchKeySet keys,
                                                      const AdaptiveNormBackward& args) {
  return without_derivative(
      adaptive_norm_backward_op(), keys, args, "cudnn_ops.adaptive_layer_norm",
      "cudnn_ops: double backward of a norm is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_adaptive_norm", cudnn_ops::kernel<cudnn_ops::adaptive_norm_autograd>);
  m.impl("_adaptive_norm_backward", cudnn_ops::kernel<cudnn_ops::adaptive_norm_backward_autograd>);
}
