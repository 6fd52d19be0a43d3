// Layer norm and RMS norm: their derivative.

#include "autograd_node.h"
#include "norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct NormBackwardNode : public torch::autograd::Node {
  SavedVariable input, weight;  // what the norm is of: the sum, where there is a residual
  at::Tensor mean, rstd;        // never differentiated
  std::vector<c10::SymInt> normalized_shape;
  bool has_residual = false, has_weight = false, is_layer = false, zero_centered = false;

  std::string name() const override {
    return "NormBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    weight.reset_data();
    mean.reset();
    rstd.reset();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(4);
    const std::array<bool, 3> wanted{
        task_should_compute_output(0) || (has_residual && task_should_compute_output(1)),
        has_weight && task_should_compute_output(2), task_should_compute_output(3)};
    if (!grads[0].defined()) {
      if (has_residual) result[0] = result[1] = grads[1];
      return result;
    }
    const at::Tensor x = has_residual ? input.unpack(owner_of(*this)) : input.unpack();
    const OptionalTensor w = has_weight ? OptionalTensor(weight.unpack()) : std::nullopt;
    const OptionalTensor grad_sum =
        has_residual && grads[1].defined() ? OptionalTensor(grads[1]) : std::nullopt;
    const auto [grad_input, grad_weight, grad_bias] = norm_backward_op().call(
        grads[0], grad_sum, x, normalized_shape, w, mean, rstd, is_layer, zero_centered, wanted);
    if (wanted[0]) result[0] = grad_input;
    if (wanted[0] && has_residual) result[1] = grad_input;
    if (wanted[1]) result[2] = grad_weight;
    if (wanted[2]) result[3] = grad_bias;
    return result;
  }
};

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
  node->has_residual = residual.has_value();
  node->has_weight = weight.has_value();
  if (weight) node->weight = SavedVariable(*weight, /*is_output=*/false);
  node->mean = mean;
  node->rstd = rstd;
  node->normalized_shape = normalized_shape.vec();
  node->is_layer = is_layer;
  node->zero_centered = zero_centered;
  torch::autograd::set_history(out, node);
  if (residual) torch::autograd::set_history(sum, node);
  node->input = SavedVariable(residual ? sum : input, /*is_output=*/residual.has_value());
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
