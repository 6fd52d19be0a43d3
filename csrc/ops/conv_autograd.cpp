// Convolutions with their epilogue: their derivative.

#include "autograd_node.h"
#include "conv.h"

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

struct ConvBackwardNode : public torch::autograd::Node {
  SavedVariable input, weight, out;
  at::Tensor before;  // never differentiated
  ConvNumbers geometry;
  ConvActivation activation = ConvActivation::kNone;

  std::string name() const override {
    return "ConvBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data();
    weight.reset_data();
    out.reset_data();
    before.reset();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    variable_list result(4);
    if (!grads[0].defined()) return result;
    OptionalTensor saved;
    if (needs_before(activation)) saved = before;
    if (activation == ConvActivation::kRelu) saved = out.unpack(owner_of(*this));
    // Without an activation the residual's is the output's.
    const bool passes_on = activation == ConvActivation::kNone;
    if (passes_on && task_should_compute_output(3)) result[3] = grads[0];
    const std::array<bool, 4> wanted{task_should_compute_output(0), task_should_compute_output(1),
                                     task_should_compute_output(2),
                                     !passes_on && task_should_compute_output(3)};
    const auto [of_input, of_weight, of_bias, of_residual] =
        conv_backward_op().call(grads[0], input.unpack(), weight.unpack(), saved, geometry,
                                static_cast<int64_t>(activation), wanted);
    if (wanted[0]) result[0] = of_input;
    if (wanted[1]) result[1] = of_weight;
    if (wanted[2]) result[2] = of_bias;
    if (wanted[3]) result[3] = of_residual;
    return result;
  }
};

ConvResults conv_autograd(c10::DispatchKeySet keys, const at::Tensor& input,
                          const at::Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& residual, c10::IntArrayRef geometry,
                          int64_t activation, bool with_before) {
  refuse_forward_mode("cudnn_ops.conv", {input, weight});
  const auto kind = static_cast<ConvActivation>(activation);
  const bool requires_grad = torch::autograd::compute_requires_grad(input, weight, bias, residual);
  ConvResults results;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    results =
        conv_op().redispatch(below_autograd(keys), input, weight, bias, residual, geometry,
                             activation, with_before || (requires_grad && needs_before(kind)));
  }
  if (!requires_grad) return results;
  auto& [out, before] = results;
  auto node = make_node<ConvBackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias, residual));
  node->input = SavedVariable(input, /*is_output=*/false);
  node->weight = SavedVariable(weight, /*is_output=*/false);
  node->before = before;
  node->geometry = ConvNumbers(geometry.begin(), geometry.end());
  node->activation = kind;
  torch::autograd::set_history(out, node);
  if (kind == ConvActivation::kRelu) node->out = SavedVariable(out, /*is_output=*/true);
  return results;
}

ConvGradients conv_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                                     const at::Tensor& input, const at::Tensor& weight,
                                     const OptionalTensor& saved, c10::IntArrayRef geometry,
                                     int64_t activation, std::array<bool, 4> output_mask) {
  ConvGradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = conv_backward_op().redispatch(below_autograd(keys), grad_out, input, weight, saved,
                                          geometry, activation, output_mask);
  }
  if (torch::autograd::compute_requires_grad(grad_out, input, weight)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops: double backward of a convolution is not available; compute that part with "
        "torch.nn.functional",
        torch::autograd::collect_next_edges(grad_out, input, weight));
    std::apply([&](auto&... tensor) { (torch::autograd::set_history(tensor, node), ...); }, grads);
  }
  return grads;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_conv", cudnn_ops::conv_autograd);
  m.impl("_conv_backward", cudnn_ops::conv_backward_autograd);
}
