// Convolutions with their epilogue: their derivative.

#include "ops/autograd_node.h"
#include "ops/conv/conv.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kConvBackward[] = "ConvBackward";

const Operator<ConvGradients, ConvMaskedBackward>& conv_backward_op() {
  static const Operator<ConvGradients, ConvMaskedBackward> op("cudnn_ops::_conv_backward");
  return op;
}

variable_list conv_gradients(const variable_list& grads, const Wanted<4>& wanted,
                             const ConvSaved& saved) {
  // Without an activation the residual's is the output's.
  const bool passes_on = saved.activation == static_cast<int64_t>(Activation::kNone) && wanted[3];
  Wanted<4> computed = wanted;
  if (passes_on) computed[3] = false;
  variable_list result =
      only_wanted(computed, conv_backward_op().call({{grads[0], saved}, computed}));
  if (passes_on) result[3] = grads[0];
  return result;
}

using ConvBackwardNode = BackwardNode<kConvBackward, conv_gradients>;

ConvResults conv_autograd(c10::DispatchKeySet keys, const ConvForward& args) {
  const Conv& conv = args.conv;
  refuse_forward_mode("cudnn_ops.conv", conv);
  const bool requires_grad =
      torch::autograd::compute_requires_grad(conv.input, conv.weight, conv.bias, conv.residual);
  if (!requires_grad) return call_below_autograd(conv_op(), keys, args);
  const Activation kind = conv.kind();
  const ConvResults results =
      call_below_autograd(conv_op(), keys, conv, args.with_before || needs_before(kind));
  const auto& [out, before] = results;
  OptionalTensor of_activation;
  if (needs_before(kind)) of_activation = before;
  if (kind == Activation::kRelu) of_activation = out;
  const Borrowed<ConvSaved> saved(conv.input, conv.weight, of_activation, conv.geometry.numbers,
                                  conv.activation);
  set_derivative<ConvBackwardNode>(
      torch::autograd::collect_next_edges(conv.input, conv.weight, conv.bias, conv.residual), {out},
      *saved);
  return results;
}

ConvGradients conv_backward_autograd(c10::DispatchKeySet keys, const ConvMaskedBackward& args) {
  return without_derivative(
      conv_backward_op(), keys, args, "cudnn_ops.conv backward",
      "cudnn_ops: double backward of a convolution is not available; compute that part with "
      "torch.nn.functional");
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_conv", cudnn_ops::kernel<cudnn_ops::conv_autograd>);
  m.impl("_conv_backward", cudnn_ops::kernel<cudnn_ops::conv_backward_autograd>);
}
