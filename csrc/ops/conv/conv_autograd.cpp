// Convolutions with their epilogue: their derivative, and autocast.

#include "ops/autocast.h"
#include "ops/autograd_node.h"
#include "ops/conv/conv_public.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "ConvBackward";

const Operator<ConvGradients, ConvMaskedBackward>& conv_backward_op() {
  static const Operator<ConvGradients, ConvMaskedBackward> op("cudnn_ops::_conv_backward");
  return op;
}

variable_list conv_gradients(const variable_list& grads, const Wanted<4>& wanted,
                             const ConvSaved& saved) {
  // Without an activation the residual's is the output's.
  const bool passes_on =
      saved.activation == static_cast<int64_t>(ConvActivation::kNone) && wanted[3];
  Wanted<4> computed = wanted;
  if (passes_on) computed[3] = false;
  variable_list result =
      only_wanted(computed, conv_backward_op().call({{grads[0], saved}, computed}));
  if (passes_on) result[3] = grads[0];
  return result;
}

using ConvBackwardNode = BackwardNode<kBackward, conv_gradients>;

ConvResults conv_autograd(c10::DispatchKeySet keys, const ConvForward& args) {
  const Conv& conv = args.conv;
  refuse_forward_mode("cudnn_ops.conv", {conv.input, conv.weight});
  const bool requires_grad =
      torch::autograd::compute_requires_grad(conv.input, conv.weight, conv.bias, conv.residual);
  if (!requires_grad) return call_below_autograd(conv_op(), keys, args);
  const ConvActivation kind = conv.kind();
  const ConvResults results =
      call_below_autograd(conv_op(), keys, {conv, args.with_before || needs_before(kind)});
  const auto& [out, before] = results;
  ConvSaved saved{conv.input, conv.weight, /*saved=*/{}, conv.geometry, conv.activation};
  if (needs_before(kind)) saved.saved = before;
  if (kind == ConvActivation::kRelu) saved.saved = out;
  set_derivative<ConvBackwardNode>(
      torch::autograd::collect_next_edges(conv.input, conv.weight, conv.bias, conv.residual), {out},
      saved);
  return results;
}

ConvGradients conv_backward_autograd(c10::DispatchKeySet keys, const ConvMaskedBackward& args) {
  return without_derivative(
      conv_backward_op(), keys, args,
      "cudnn_ops: double backward of a convolution is not available; compute that part with "
      "torch.nn.functional");
}
// The rule that torch has for its own convolutions: the lower precision.
template <c10::DeviceType device, class Args>
struct Autocast {
  template <const char* const& name, const char* const& overload>
  static at::Tensor call(const Args& args) {
    static const Operator<at::Tensor, Args> op(name, overload);
    return call_in_dtype<device>(op, args, at::autocast::get_autocast_dtype(device));
  }
};

constexpr const char *kByNumbers = "", *kByName = "padding";
constexpr const char *kConv1d = "cudnn_ops::conv1d", *kPacked1d = "cudnn_ops::_conv1d";
constexpr const char *kConv2d = "cudnn_ops::conv2d", *kPacked2d = "cudnn_ops::_conv2d";
constexpr const char *kConv3d = "cudnn_ops::conv3d", *kPacked3d = "cudnn_ops::_conv3d";

template <c10::DeviceType device, const char* const& name, const char* const& packed>
void register_dims(torch::Library& m) {
  using ByNumbers = Autocast<device, PublicConv<ConvNumbers>>;
  using ByName = Autocast<device, PublicConv<std::string_view>>;
  using Packed = Autocast<device, PackedConv>;
  m.impl(name, kernel<ByNumbers::template call<name, kByNumbers>>);
  m.impl((std::string(name) + ".padding").c_str(), kernel<ByName::template call<name, kByName>>);
  m.impl(packed, kernel<Packed::template call<packed, kByNumbers>>);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  register_dims<device, kConv1d, kPacked1d>(m);
  register_dims<device, kConv2d, kPacked2d>(m);
  register_dims<device, kConv3d, kPacked3d>(m);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_conv", cudnn_ops::kernel<cudnn_ops::conv_autograd>);
  m.impl("_conv_backward", cudnn_ops::kernel<cudnn_ops::conv_backward_autograd>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<at::kCPU>(m);
}
