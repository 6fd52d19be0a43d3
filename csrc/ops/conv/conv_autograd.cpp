// Convolutions with their epilogue: their derivative.

#include "ops/autograd_node.h"
#include "ops/conv/conv.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "ConvBackward";

// `saved` as of _conv_backward.
variable_list conv_gradients(const variable_list& grads, const Wanted<4>& wanted,
                             const at::Tensor& input, const at::Tensor& weight,
                             const OptionalTensor& saved, c10::IntArrayRef geometry,
                             int64_t activation) {
  // Without an activation the residual's is the output's.
  const bool passes_on = activation == static_cast<int64_t>(ConvActivation::kNone) && wanted[3];
  Wanted<4> computed = wanted;
  if (passes_on) computed[3] = false;
  variable_list result = only_wanted(
      computed,
      conv_backward_op().call(grads[0], input, weight, saved, geometry, activation, computed));
  if (passes_on) result[3] = grads[0];
  return result;
}

using ConvBackwardNode = FlatNode<kBackward, conv_gradients>;

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
  torch::autograd::set_history(out, node);
  OptionalTensor saved;
  if (needs_before(kind)) saved = before;
  if (kind == ConvActivation::kRelu) saved = out;
  node->save(input, weight, saved, geometry, activation);
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
