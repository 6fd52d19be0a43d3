// Attention over packed sequences: its derivative and its autocast rule.

#include "ops/autograd_node.h"
#include "ops/attention/lse_gradient.h"
#include "ops/attention/packed/varlen_call.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr char kBackward[] = "VarlenBackward";

// Adds the gradients that come by the log-sum-exp.
void add_lse_gradient(const Varlen& args, const at::Tensor& grad_lse, const at::Tensor& lse,
                      bool grad_value, VarlenGradients& results) {
  const LseGradient of_lse(args.value, grad_lse.t(), lse.t());
  const OptionalTensor none;
  const Varlen scores{args.query,
                      args.key,
                      of_lse.value,
                      args.cu_seqlens_q,
                      args.cu_seqlens_k,
                      args.max_seqlen_q,
                      args.max_seqlen_k,
                      0.0,
                      args.scale,
                      args.is_causal,
                      args.window_size,
                      args.softcap,
                      args.alibi_slopes,
                      none,
                      args.seqused_q,
                      args.seqused_k,
                      args.bottom_right,
                      args.deterministic,
                      none};
  const auto of_scores = call_backward(scores, {of_lse.grad_out, of_lse.out, lse});
  add_gradient(std::get<0>(results), std::get<0>(of_scores));
  add_gradient(std::get<1>(results), std::get<1>(of_scores));
  if (grad_value) or_zeros(std::get<2>(results), args.value);
  if (args.sinks) {
    add_gradient(std::get<3>(results), LseGradient::of_sinks(*args.sinks, of_lse.g.t(), lse, {1}));
  }
}

// `cu_seqlens_k`: none where one tensor serves both sides. Which it is decides on the plan, and
// hooks would bring two tensors back. `sinks`: for their own gradient alone, as in
// sdpa_autograd.cpp.
variable_list varlen_gradients(const variable_list& grads, const Wanted<4>& wanted,
                               const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                               const OptionalTensor& cu_seqlens_k, const c10::SymInt& max_seqlen_q,
                               const c10::SymInt& max_seqlen_k, double dropout_p,
                               const std::optional<double>& scale, bool is_causal,
                               c10::IntArrayRef window_size, double softcap,
                               const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                               const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
                               bool bottom_right, const std::optional<bool>& deterministic,
                               const OptionalTensor& rng_state, const at::Tensor& out,
                               const at::Tensor& lse) {
  const at::Tensor q = with_unit_last_stride(query), k = with_unit_last_stride(key),
                   v = with_unit_last_stride(value);
  const at::Tensor offsets_k = cu_seqlens_k.value_or(cu_seqlens_q);
  const OptionalTensor differentiated = wanted[3] ? sinks : std::nullopt;
  const Varlen args{q,
                    k,
                    v,
                    cu_seqlens_q,
                    offsets_k,
                    max_seqlen_q,
                    max_seqlen_k,
                    dropout_p,
                    scale,
                    is_causal,
                    window_size,
                    softcap,
                    alibi_slopes,
                    differentiated,
                    seqused_q,
                    seqused_k,
                    bottom_right,
                    deterministic,
                    rng_state};
  VarlenGradients results;
  if (grads[0].defined()) results = call_backward(args, {grads[0], out, lse});
  if (grads.size() > 1 && grads[1].defined()) {
    add_lse_gradient(args, grads[1], lse, wanted[2], results);
  }
  return only_wanted(wanted, results);
}

using VarlenBackwardNode = FlatNode<kBackward, varlen_gradients>;

void check_differentiable(const Varlen& args) {
  refuse_forward_mode("cudnn_ops.varlen_attention", {args.query, args.key, args.value});
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::compute_requires_grad(args.alibi_slopes),
      "cudnn_ops.varlen_attention: cuDNN has no gradient for alibi_slopes; detach them");
}

// The numbers of a dropout are drawn before anything else: see sdpa_autograd.cpp.
template <class Function>
auto with_rng_state(const Varlen& args, const Function& function) {
  if (args.dropout_p == 0 || args.rng_state) return function(args);
  const OptionalTensor state =
      attention_rng_state_op().call(args.query, args.max_seqlen_q, args.max_seqlen_k);
  return function(Varlen{args.query, args.key, args.value, args.cu_seqlens_q, args.cu_seqlens_k,
                         args.max_seqlen_q, args.max_seqlen_k, args.dropout_p, args.scale,
                         args.is_causal, args.window_size, args.softcap, args.alibi_slopes,
                         args.sinks, args.seqused_q, args.seqused_k, args.bottom_right,
                         args.deterministic, state});
}

// Runs the forward that saves what the derivative needs, and attaches the Node to `out`, and
// to `lse` where the caller gets it.
OutAndLse forward_with_node(c10::DispatchKeySet keys, const Varlen& args, bool returns_lse) {
  auto node = make_node<VarlenBackwardNode>();
  node->set_next_edges(
      torch::autograd::collect_next_edges(args.query, args.key, args.value, args.sinks));
  at::Tensor out, lse;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, lse) = redispatch(varlen_with_lse_op(), below_autograd(keys), args);
  }
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  const bool is_same = args.cu_seqlens_k.is_same(args.cu_seqlens_q);
  const bool is_of_sinks = torch::autograd::compute_requires_grad(args.sinks);
  const OptionalTensor none;
  node->save(args.query, args.key, args.value, args.cu_seqlens_q,
             is_same ? none : OptionalTensor(args.cu_seqlens_k), args.max_seqlen_q,
             args.max_seqlen_k, args.dropout_p, args.scale, args.is_causal, args.window_size,
             args.softcap, args.alibi_slopes, is_of_sinks ? args.sinks : none, args.seqused_q,
             args.seqused_k, args.bottom_right, args.deterministic, args.rng_state, out, lse);
  return {std::move(out), std::move(lse)};
}

bool requires_grad(const Varlen& args) {
  return torch::autograd::compute_requires_grad(args.query, args.key, args.value, args.sinks);
}

at::Tensor varlen_autograd(c10::DispatchKeySet keys, const Varlen& given) {
  if (!is_regular(given)) return varlen_as_regular(given);
  check_differentiable(given);
  return with_rng_state(given, [&](const Varlen& args) {
    if (requires_grad(args))
      return std::get<0>(forward_with_node(keys, args, /*returns_lse=*/false));
    at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch(varlen_op(), below_autograd(keys), args);
  });
}

OutAndLse varlen_with_lse_autograd(c10::DispatchKeySet keys, const Varlen& given) {
  if (!is_regular(given)) return varlen_with_lse_as_regular(given);
  check_differentiable(given);
  return with_rng_state(given, [&](const Varlen& args) {
    if (requires_grad(args)) return forward_with_node(keys, args, /*returns_lse=*/true);
    at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch(varlen_with_lse_op(), below_autograd(keys), args);
  });
}

VarlenGradients varlen_backward_autograd(c10::DispatchKeySet keys, const Varlen& args,
                                         const VarlenGrad& grad) {
  VarlenGradients grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = redispatch_backward(below_autograd(keys), args, grad);
  }
  if (torch::autograd::compute_requires_grad(grad.grad_out, args.query, args.key, args.value,
                                             grad.out, grad.lse, args.sinks)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops.varlen_attention: double backward is not available, cuDNN has no second "
        "derivative of attention",
        torch::autograd::collect_next_edges(grad.grad_out, args.query, args.key, args.value,
                                            grad.out, grad.lse, args.sinks));
    std::apply([&](auto&... tensor) { (torch::autograd::set_history(tensor, node), ...); }, grads);
  }
  return grads;
}

template <c10::DeviceType device, class Result,
          const c10::TypedOperatorHandle<VarlenOp<Result>>& (*op)()>
Result autocast(const Varlen& args) {
  constexpr auto key_of_device =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of_device);
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  const at::Tensor query = cast(args.query), key = cast(args.key), value = cast(args.value);
  return call(op(), {query, key, value, args.cu_seqlens_q, args.cu_seqlens_k, args.max_seqlen_q,
                     args.max_seqlen_k, args.dropout_p, args.scale, args.is_causal,
                     args.window_size, args.softcap, args.alibi_slopes, args.sinks, args.seqused_q,
                     args.seqused_k, args.bottom_right, args.deterministic, args.rng_state});
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("varlen_attention", varlen_kernel<at::Tensor, autocast<device, at::Tensor, varlen_op>>);
  m.impl("varlen_attention_with_lse",
         varlen_kernel<OutAndLse, autocast<device, OutAndLse, varlen_with_lse_op>>);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  using namespace cudnn_ops;
  m.impl("varlen_attention", varlen_kernel<at::Tensor, varlen_autograd>);
  m.impl("varlen_attention_with_lse", varlen_kernel<OutAndLse, varlen_with_lse_autograd>);
  m.impl("_varlen_backward", varlen_backward_kernel<varlen_backward_autograd>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<at::kCPU>(m);
}
