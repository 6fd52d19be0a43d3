// Layer norm and RMS norm: their derivative.

#include "ops/autograd_node.h"
#include "ops/norm/norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "NormBackward";

// `input` is what the norm is of: the sum, where there is a residual.
variable_list norm_gradients(const variable_list& grads, const Wanted<4>& wanted,
                             const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                             const OptionalTensor& weight, const at::Tensor& mean,
                             const at::Tensor& rstd, bool has_residual, bool is_layer,
                             bool zero_centered) {
  variable_list result(4);
  if (!grads[0].defined()) {
    result[0] = result[1] = grads[1];
    const at::Tensor& like = weight ? *weight : input;
    for (const size_t i : {2, 3}) {
      if (wanted[i]) result[i] = like.new_zeros_symint(normalized_shape);
    }
    return result;
  }
  const std::array<bool, 3> computed{wanted[0] || wanted[1], wanted[2], wanted[3]};
  const OptionalTensor grad_sum =
      has_residual && grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
  const auto [grad_input, grad_weight, grad_bias] = norm_backward_op().call(
      grads[0], grad_sum, input, normalized_shape, weight, mean.contiguous(), rstd.contiguous(),
      is_layer, zero_centered, computed);
  if (computed[0]) result[0] = grad_input;
  if (computed[0] && has_residual) result[1] = grad_input;
  if (computed[1]) result[2] = grad_weight;
  if (computed[2]) result[3] = grad_bias;
  return result;
}

using NormBackwardNode = FlatNode<kBackward, norm_gradients>;

NormResults norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                          const OptionalTensor& residual, c10::SymIntArrayRef normalized_shape,
                          const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                          bool is_layer, bool zero_centered, bool with_stats) {
  refuse_forward_mode(is_layer ? "cudnn_ops.layer_norm" : "cudnn_ops.rms_norm", {input});
  const bool requires_grad = torch::autograd::compute_requires_grad(input, residual, weight, bias);
  NormResults results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results = norm_op().redispatch(below_autograd(keys), input, residual, normalized_shape, weight,
                                   bias, eps, is_layer, zero_centered, with_stats || requires_grad);
  }
  if (!requires_grad) return results;
  auto& [out, sum, mean, rstd] = results;
  auto node = make_node<NormBackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, residual, weight, bias));
  torch::autograd::set_history(out, node);
  if (residual) torch::autograd::set_history(sum, node);
  node->save(residual ? sum : input, normalized_shape, weight, mean, rstd, residual.has_value(),
             is_layer, zero_centered);
  return results;
}

// There is no derivative of the norms' backward: its results can be used, but asking for a
// gradient through them raises.
NormGradients norm_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                                     const OptionalTensor& grad_sum, const at::Tensor& input,
                                     c10::SymIntArrayRef normalized_shape,
                                     const OptionalTensor& weight, const at::Tensor& mean,
                                     const at::Tensor& rstd, bool is_layer, bool zero_centered,
                                     std::array<bool, 3> output_mask) {
  NormGradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = norm_backward_op().redispatch(below_autograd(keys), grad_out, grad_sum, input,
                                          normalized_shape, weight, mean, rstd, is_layer,
                                          zero_centered, output_mask);
  }
  if (torch::autograd::compute_requires_grad(grad_out, grad_sum, input, weight)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops: double backward of a norm is not available; compute that part with "
        "torch.nn.functional",
        torch::autograd::collect_next_edges(grad_out, grad_sum, input, weight));
    std::apply([&](auto&... tensor) { (torch::autograd::set_history(tensor, node), ...); }, grads);
  }
  return grads;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_norm", cudnn_ops::norm_autograd);
  m.impl("_norm_backward", cudnn_ops::norm_backward_autograd);
}
