// Scaled dot-product attention: its derivative.

#include "ops/autograd_node.h"
#include "ops/attention/lse_gradient.h"
#include "ops/attention/dense/sdpa_call.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <array>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "SdpaBackward";

// Adds the gradients that come by the log-sum-exp.
void add_lse_gradient(const Attention& args, const at::Tensor& grad_lse, const at::Tensor& lse,
                      bool grad_mask, bool grad_value, Gradients& results) {
  const LseGradient of_lse(args.value, grad_lse, lse);
  const OptionalTensor none;
  const Attention scores{args.query,
                         args.key,
                         of_lse.value,
                         args.attn_mask,
                         0.0,
                         args.is_causal,
                         args.scale,
                         true,
                         args.window_size,
                         args.bottom_right,
                         args.softcap,
                         args.alibi_slopes,
                         none,
                         args.seq_lens_q,
                         args.seq_lens_kv,
                         args.deterministic,
                         none};
  const auto of_scores = call_backward(scores, {of_lse.grad_out, of_lse.out, lse, grad_mask});
  add_gradient(std::get<0>(results), std::get<0>(of_scores));
  add_gradient(std::get<1>(results), std::get<1>(of_scores));
  if (grad_value) or_zeros(std::get<2>(results), args.value);
  if (grad_mask) add_gradient(std::get<3>(results), std::get<3>(of_scores));
  if (args.sinks) {
    add_gradient(std::get<4>(results), LseGradient::of_sinks(*args.sinks, of_lse.g, lse, {0, 2}));
  }
}

// `sinks` are in lse already: the backward needs them for their own gradient alone.
variable_list sdpa_gradients(const variable_list& grads, const Wanted<5>& wanted,
                             const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const OptionalTensor& attn_mask,
                             double dropout_p, bool is_causal, const std::optional<double>& scale,
                             c10::IntArrayRef window_size, bool bottom_right, double softcap,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                             const OptionalTensor& seq_lens_q, const OptionalTensor& seq_lens_kv,
                             const std::optional<bool>& deterministic,
                             const OptionalTensor& rng_state, const at::Tensor& out,
                             const at::Tensor& lse) {
  const at::Tensor q = with_unit_last_stride(query), k = with_unit_last_stride(key),
                   v = with_unit_last_stride(value);
  const OptionalTensor differentiated = wanted[4] ? sinks : std::nullopt;
  const Attention args{q,
                       k,
                       v,
                       attn_mask,
                       dropout_p,
                       is_causal,
                       scale,
                       true,
                       window_size,
                       bottom_right,
                       softcap,
                       alibi_slopes,
                       differentiated,
                       seq_lens_q,
                       seq_lens_kv,
                       deterministic,
                       rng_state};
  Gradients results;
  if (grads[0].defined()) results = call_backward(args, {grads[0], out, lse, wanted[3]});
  if (grads.size() > 1 && grads[1].defined()) {
    add_lse_gradient(args, grads[1], lse, wanted[3], wanted[2], results);
  }
  return only_wanted(wanted, results);
}

using SdpaBackwardNode = FlatNode<kBackward, sdpa_gradients>;

bool requires_grad(const Attention& args) {
  return torch::autograd::compute_requires_grad(args.query, args.key, args.value, args.attn_mask,
                                                args.sinks);
}

void check_differentiable(const Attention& args) {
  refuse_forward_mode("cudnn_ops.sdpa", {args.query, args.key, args.value});
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::compute_requires_grad(args.alibi_slopes),
      "cudnn_ops.sdpa: cuDNN has no gradient for alibi_slopes; detach them");
}

// Draws the numbers of a dropout before anything else, so that what follows depends on nothing
// but its arguments: a compiler may compute it again, and the backward drops the same.
template <class Function>
auto with_rng_state(const Attention& args, const Function& function) {
  if (args.dropout_p == 0 || args.rng_state) return function(args);
  const OptionalTensor state =
      attention_rng_state_op().call(args.query, args.query.sym_size(2), args.key.sym_size(2));
  return function(Attention{args.query, args.key, args.value, args.attn_mask, args.dropout_p,
                            args.is_causal, args.scale, args.enable_gqa, args.window_size,
                            args.bottom_right, args.softcap, args.alibi_slopes, args.sinks,
                            args.seq_lens_q, args.seq_lens_kv, args.deterministic, state});
}

// Runs the forward that saves what the derivative needs, and attaches the Node to `out`, and
// to `lse` where the caller gets it.
OutAndLse forward_with_node(c10::DispatchKeySet keys, const Attention& args, bool returns_lse) {
  auto node = make_node<SdpaBackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(args.query, args.key, args.value,
                                                           args.attn_mask, args.sinks));
  at::Tensor out, lse;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, lse) = redispatch(sdpa_with_lse_op(), below_autograd(keys), args);
  }
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  const bool is_of_sinks = torch::autograd::compute_requires_grad(args.sinks);
  const OptionalTensor none;
  node->save(args.query, args.key, args.value, args.attn_mask, args.dropout_p, args.is_causal,
             args.scale, args.window_size, args.bottom_right, args.softcap, args.alibi_slopes,
             is_of_sinks ? args.sinks : none, args.seq_lens_q, args.seq_lens_kv, args.deterministic,
             args.rng_state, out, lse);
  return {std::move(out), std::move(lse)};
}

at::Tensor sdpa_autograd(c10::DispatchKeySet keys, const Attention& given) {
  if (!is_regular(given)) return sdpa_as_regular(given);
  check_differentiable(given);
  return with_rng_state(given, [&](const Attention& args) {
    if (requires_grad(args)) {
      return std::get<0>(forward_with_node(keys, args, /*returns_lse=*/false));
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch(sdpa_op(), below_autograd(keys), args);
  });
}

OutAndLse sdpa_with_lse_autograd(c10::DispatchKeySet keys, const Attention& given) {
  if (!is_regular(given)) return sdpa_with_lse_as_regular(given);
  check_differentiable(given);
  return with_rng_state(given, [&](const Attention& args) {
    if (requires_grad(args)) return forward_with_node(keys, args, /*returns_lse=*/true);
    at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch(sdpa_with_lse_op(), below_autograd(keys), args);
  });
}

// cuDNN has no derivative of its attention backward: its results can be used, but asking for
// a gradient through them raises.
Gradients sdpa_backward_autograd(c10::DispatchKeySet keys, const Attention& args,
                                 const AttentionGrad& grad) {
  Gradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = redispatch_backward(below_autograd(keys), args, grad);
  }
  if (torch::autograd::compute_requires_grad(grad.grad_out, args.query, args.key, args.value,
                                             grad.out, grad.lse, args.attn_mask, args.sinks)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops.sdpa: double backward is not available, cuDNN has no second derivative of "
        "attention; compute that part with torch.nn.functional.scaled_dot_product_attention "
        "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
        torch::autograd::collect_next_edges(grad.grad_out, args.query, args.key, args.value,
                                            grad.out, grad.lse, args.attn_mask, args.sinks));
    std::apply([&](auto&... tensor) { (torch::autograd::set_history(tensor, node), ...); }, grads);
  }
  return grads;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("sdpa", attention_kernel<at::Tensor, sdpa_autograd>);
  m.impl("sdpa_with_lse", attention_kernel<OutAndLse, sdpa_with_lse_autograd>);
  m.impl("_sdpa_backward", backward_kernel<sdpa_backward_autograd>);
}
