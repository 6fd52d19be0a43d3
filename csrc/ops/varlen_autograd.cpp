// Attention over packed sequences: its derivative and its autocast rule.

#include "autograd_node.h"
#include "lse_gradient.h"
#include "varlen_call.h"

#include <ATen/autocast_mode.h>
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

struct VarlenBackwardNode : public torch::autograd::Node {
  SavedVariable query, key, value, sinks, out, lse;
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // these and the next are never differentiated
  OptionalTensor alibi_slopes, seqused_q, seqused_k, rng_state;
  bool has_sinks = false;
  c10::SymInt max_seqlen_q, max_seqlen_k;
  double dropout_p = 0.0;
  std::optional<double> scale;
  bool is_causal = false;
  std::array<int64_t, 2> window_size{};
  double softcap = 0.0;
  bool bottom_right = true;
  std::optional<bool> deterministic;

  std::string name() const override {
    return "VarlenBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&query, &key, &value, &sinks, &out, &lse}) saved->reset_data();
    for (auto* saved : {&cu_seqlens_q, &cu_seqlens_k}) saved->reset();
    for (auto* saved : {&alibi_slopes, &seqused_q, &seqused_k, &rng_state}) saved->reset();
  }

  void save(const Varlen& args) {
    query = SavedVariable(args.query, /*is_output=*/false);
    key = SavedVariable(args.key, /*is_output=*/false);
    value = SavedVariable(args.value, /*is_output=*/false);
    has_sinks = args.sinks.has_value();
    if (has_sinks) sinks = SavedVariable(*args.sinks, /*is_output=*/false);
    cu_seqlens_q = args.cu_seqlens_q;
    cu_seqlens_k = args.cu_seqlens_k;
    max_seqlen_q = args.max_seqlen_q;
    max_seqlen_k = args.max_seqlen_k;
    dropout_p = args.dropout_p;
    scale = args.scale;
    is_causal = args.is_causal;
    window_size = {args.window_size[0], args.window_size[1]};
    softcap = args.softcap;
    alibi_slopes = args.alibi_slopes;
    seqused_q = args.seqused_q;
    seqused_k = args.seqused_k;
    bottom_right = args.bottom_right;
    deterministic = args.deterministic;
    rng_state = args.rng_state;
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto self = owner_of(*this);
    const at::Tensor q = query.unpack(), k = key.unpack(), v = value.unpack();
    const at::Tensor o = out.unpack(self), l = lse.unpack(self);
    // As in sdpa_autograd.cpp: for their own gradient alone.
    const bool grad_sinks = has_sinks && task_should_compute_output(3);
    const OptionalTensor sink = grad_sinks ? OptionalTensor(sinks.unpack()) : std::nullopt;
    const Varlen args{q,
                      k,
                      v,
                      cu_seqlens_q,
                      cu_seqlens_k,
                      max_seqlen_q,
                      max_seqlen_k,
                      dropout_p,
                      scale,
                      is_causal,
                      window_size,
                      softcap,
                      alibi_slopes,
                      sink,
                      seqused_q,
                      seqused_k,
                      bottom_right,
                      deterministic,
                      rng_state};
    VarlenGradients results;
    if (grads[0].defined()) results = call_backward(args, {grads[0], o, l});
    if (grads.size() > 1 && grads[1].defined()) add_lse_gradient(args, grads[1], l, results);
    variable_list result(4);
    if (task_should_compute_output(0)) result[0] = std::get<0>(results);
    if (task_should_compute_output(1)) result[1] = std::get<1>(results);
    if (task_should_compute_output(2)) result[2] = std::get<2>(results);
    if (grad_sinks) result[3] = std::get<3>(results);
    return result;
  }

 private:
  static void add_lse_gradient(const Varlen& args, const at::Tensor& grad_lse, const at::Tensor& l,
                               VarlenGradients& results) {
    const LseGradient of_lse(args.value, grad_lse.t(), l.t());
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
    const auto of_scores = call_backward(scores, {of_lse.grad_out, of_lse.out, l});
    add_gradient(std::get<0>(results), std::get<0>(of_scores));
    add_gradient(std::get<1>(results), std::get<1>(of_scores));
    if (args.sinks) {
      add_gradient(std::get<3>(results), LseGradient::of_sinks(*args.sinks, of_lse.g.t(), l, {1}));
    }
  }
};

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
  node->save(args);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->lse = SavedVariable(lse, /*is_output=*/returns_lse);
  return {std::move(out), std::move(lse)};
}

bool requires_grad(const Varlen& args) {
  return torch::autograd::compute_requires_grad(args.query, args.key, args.value, args.sinks);
}

at::Tensor varlen_autograd(c10::DispatchKeySet keys, const Varlen& given) {
  check_differentiable(given);
  return with_rng_state(given, [&](const Varlen& args) {
    if (requires_grad(args))
      return std::get<0>(forward_with_node(keys, args, /*returns_lse=*/false));
    at::AutoDispatchBelowADInplaceOrView guard;
    return redispatch(varlen_op(), below_autograd(keys), args);
  });
}

OutAndLse varlen_with_lse_autograd(c10::DispatchKeySet keys, const Varlen& given) {
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
