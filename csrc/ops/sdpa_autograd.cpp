// Scaled dot-product attention: its derivative.

#include "autograd_node.h"
#include "lse_gradient.h"
#include "sdpa_call.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>

namespace cudnn_ops {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The tensors and options of a call, kept from the forward to the backward.
struct SdpaBackwardNode : public torch::autograd::Node {
  SavedVariable query, key, value, attn_mask, sinks, out, lse;
  OptionalTensor alibi_slopes, seq_lens_q, seq_lens_kv, rng_state;  // never differentiated
  bool has_mask = false, has_sinks = false;
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  std::array<int64_t, 2> window_size{};
  bool bottom_right = false;
  double softcap = 0.0;
  std::optional<bool> deterministic;

  std::string name() const override {
    return "SdpaBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&query, &key, &value, &attn_mask, &sinks, &out, &lse}) saved->reset_data();
    for (auto* saved : {&alibi_slopes, &seq_lens_q, &seq_lens_kv, &rng_state}) saved->reset();
  }

  void save(const Attention& args) {
    query = SavedVariable(args.query, /*is_output=*/false);
    key = SavedVariable(args.key, /*is_output=*/false);
    value = SavedVariable(args.value, /*is_output=*/false);
    has_mask = args.attn_mask.has_value();
    if (has_mask) attn_mask = SavedVariable(*args.attn_mask, /*is_output=*/false);
    has_sinks = args.sinks.has_value();
    if (has_sinks) sinks = SavedVariable(*args.sinks, /*is_output=*/false);
    alibi_slopes = args.alibi_slopes;
    seq_lens_q = args.seq_lens_q;
    seq_lens_kv = args.seq_lens_kv;
    rng_state = args.rng_state;
    dropout_p = args.dropout_p;
    is_causal = args.is_causal;
    scale = args.scale;
    window_size = {args.window_size[0], args.window_size[1]};
    bottom_right = args.bottom_right;
    softcap = args.softcap;
    deterministic = args.deterministic;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const at::Tensor grad_out = grads[0];
    const at::Tensor grad_lse = grads.size() > 1 ? grads[1] : at::Tensor();
    const auto self = owner_of(*this);
    const at::Tensor q = query.unpack(), k = key.unpack(), v = value.unpack();
    const at::Tensor o = out.unpack(self), l = lse.unpack(self);
    const OptionalTensor mask = has_mask ? OptionalTensor(attn_mask.unpack()) : std::nullopt;
    // The sinks are in lse already: the backward needs them for their own gradient alone.
    const bool grad_sinks = has_sinks && task_should_compute_output(4);
    const OptionalTensor sink = grad_sinks ? OptionalTensor(sinks.unpack()) : std::nullopt;
    const Attention args{q,     k,          v,           mask,          dropout_p, is_causal,
                         scale, true,       window_size, bottom_right,  softcap,   alibi_slopes,
                         sink,  seq_lens_q, seq_lens_kv, deterministic, rng_state};
    const bool grad_mask = has_mask && task_should_compute_output(3);

    Gradients results;
    if (grad_out.defined()) results = call_backward(args, {grad_out, o, l, grad_mask});
    if (grad_lse.defined()) add_lse_gradient(args, grad_lse, l, grad_mask, results);
    variable_list result(5);
    if (task_should_compute_output(0)) result[0] = std::get<0>(results);
    if (task_should_compute_output(1)) result[1] = std::get<1>(results);
    if (task_should_compute_output(2)) result[2] = std::get<2>(results);
    if (grad_mask) result[3] = std::get<3>(results);
    if (grad_sinks) result[4] = std::get<4>(results);
    return result;
  }

 private:
  static void add_lse_gradient(const Attention& args, const at::Tensor& grad_lse,
                               const at::Tensor& l, bool grad_mask, Gradients& results) {
    const LseGradient of_lse(args.value, grad_lse, l);
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
    const auto of_scores = call_backward(scores, {of_lse.grad_out, of_lse.out, l, grad_mask});
    add_gradient(std::get<0>(results), std::get<0>(of_scores));
    add_gradient(std::get<1>(results), std::get<1>(of_scores));
    if (grad_mask) add_gradient(std::get<3>(results), std::get<3>(of_scores));
    if (args.sinks) {
      add_gradient(std::get<4>(results), LseGradient::of_sinks(*args.sinks, of_lse.g, l, {0, 2}));
    }
  }
};

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
  node->save(args);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->lse = SavedVariable(lse, /*is_output=*/returns_lse);
  return {std::move(out), std::move(lse)};
}

at::Tensor sdpa_autograd(c10::DispatchKeySet keys, const Attention& given) {
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
