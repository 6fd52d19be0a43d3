// The derivative of an attention operator, dense or packed, and its autocast rule. The families are
// alike but for what SdpaFamily (dense/sdpa_autograd.cpp) and VarlenFamily
// (packed/varlen_autograd.cpp) say:
//
//   kName                      the operator's, in the library
//   Args, Backward, Gradients  the structs of the operator and of its backward, and its results
//   Saved                      what the Node keeps: at least `args`, `out` and `lse`
//   kInputs                    how many inputs have a gradient, the last of them the sinks
//   inputs(args)               those inputs, in the order of the gradients
//   op(), with_lse_op(), backward_op(), regular(args), regular_with_lse(args)
//   lengths(args)              over how many queries and keys a dropout draws its numbers
//   restored(saved)            the arguments as the backward gets them
//   by_heads(lse)              [..., rows of a head] as `out` has its rows, and back
#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/lse_gradient.h"
#include "ops/attention/sinks.h"
#include "ops/autograd_node.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <string>

namespace cudnn_ops {

// Adds the gradients that come by the log-sum-exp.
template <class Family>
void add_lse_gradient(typename Family::Backward given, const at::Tensor& grad_lse, bool wants_value,
                      typename Family::Gradients& results) {
  const OptionalTensor sinks = given.args.sinks;
  const at::Tensor value = given.args.value, lse = given.lse;
  const LseGradient of_lse(value, Family::by_heads(grad_lse), Family::by_heads(lse));
  given.args.value = of_lse.value;
  given.args.dropout_p = 0;
  given.args.rng_state.reset();
  given.args.sinks.reset();
  given.grad_out = of_lse.grad_out;
  given.out = of_lse.out;
  const auto of_scores = Family::backward_op().call(given);
  add_gradient(std::get<0>(results), std::get<0>(of_scores));
  add_gradient(std::get<1>(results), std::get<1>(of_scores));
  if (wants_value) or_zeros(std::get<2>(results), value);
  if constexpr (Family::kInputs == 5) {  // the mask's
    if (given.grad_mask) add_gradient(std::get<3>(results), std::get<3>(of_scores));
  }
  if (sinks) {
    add_gradient(std::get<Family::kInputs - 1>(results),
                 sum_over_sinks(*sinks, Family::by_heads(of_lse.g), lse));
  }
}

// As the kernels require it, where a saved-tensor hook brought it back in another layout.
inline at::Tensor with_unit_last_stride(const at::Tensor& tensor) {
  return tensor.sym_stride(-1) == 1 ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// The sinks are in the log-sum-exp already: the backward needs them for their own gradient alone.
template <class Family>
variable_list attention_gradients(const variable_list& grads, const Wanted<Family::kInputs>& wanted,
                                  const typename Family::Saved& saved) {
  typename Family::Backward given{Family::restored(saved), grads[0], saved.out, saved.lse};
  for (auto* tensor : {&given.args.query, &given.args.key, &given.args.value}) {
    *tensor = with_unit_last_stride(*tensor);
  }
  if (!wanted[Family::kInputs - 1]) given.args.sinks.reset();
  if constexpr (Family::kInputs == 5) given.grad_mask = wanted[3];
  typename Family::Gradients results;
  if (grads[0].defined()) results = Family::backward_op().call(given);
  if (grads.size() > 1 && grads[1].defined()) {
    add_lse_gradient<Family>(given, grads[1], wanted[2], results);
  }
  return only_wanted(wanted, results);
}

// The numbers of a dropout are drawn before anything else, so that what follows depends on nothing
// but its arguments: a compiler may compute it again, and the backward drops the same.
inline bool needs_rng_state(const AttentionOptions& options) {
  return options.dropout_p != 0 && !options.rng_state;
}

template <class Family>
typename Family::Args with_rng_state(typename Family::Args args) {
  const auto [length, length_kv] = Family::lengths(args);
  args.rng_state = attention_rng_state_op().call({args.query, length, length_kv});
  return args;
}

template <class Family>
bool requires_grad(const typename Family::Args& args) {
  return std::apply(
      [](const auto&... input) { return torch::autograd::compute_requires_grad(input...); },
      Family::inputs(args));
}

// Runs the forward that saves what the derivative needs, and attaches the Node to `out`, and
// to `lse` where the caller gets it.
template <class Family>
OutAndLse forward_with_node(c10::DispatchKeySet keys, const typename Family::Args& args,
                            bool returns_lse) {
  auto node = make_node<BackwardNode<Family::kNode, attention_gradients<Family>>>();
  node->set_next_edges(
      std::apply([](const auto&... input) { return torch::autograd::collect_next_edges(input...); },
                 Family::inputs(args)));
  at::Tensor out, lse;
  std::tie(out, lse) = call_below_autograd(Family::with_lse_op(), keys, args);
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  typename Family::Saved saved{args, out, lse};
  if (!torch::autograd::compute_requires_grad(args.sinks)) saved.args.sinks.reset();
  node->save(saved);
  return {std::move(out), std::move(lse)};
}

template <class Family>
void check_differentiable(const typename Family::Args& args) {
  refuse_forward_mode(Family::kOp, args);
  TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::compute_requires_grad(args.alibi_slopes),
                              Family::kOp, ": cuDNN has no gradient for alibi_slopes; detach them");
}

template <class Family>
at::Tensor attention_autograd(c10::DispatchKeySet keys, const typename Family::Args& args) {
  if (!is_regular(args)) return Family::regular(args);
  check_differentiable<Family>(args);
  if (needs_rng_state(args)) {
    return attention_autograd<Family>(keys, with_rng_state<Family>(args));
  }
  if (requires_grad<Family>(args)) {
    return std::get<0>(forward_with_node<Family>(keys, args, /*returns_lse=*/false));
  }
  return call_below_autograd(Family::op(), keys, args);
}

template <class Family>
OutAndLse attention_with_lse_autograd(c10::DispatchKeySet keys, const typename Family::Args& args) {
  if (!is_regular(args)) return Family::regular_with_lse(args);
  check_differentiable<Family>(args);
  if (needs_rng_state(args)) {
    return attention_with_lse_autograd<Family>(keys, with_rng_state<Family>(args));
  }
  if (requires_grad<Family>(args)) {
    return forward_with_node<Family>(keys, args, /*returns_lse=*/true);
  }
  return call_below_autograd(Family::with_lse_op(), keys, args);
}

// The rule that torch has for its own: query, key and value become the lower precision, and not
// the masks, which cuDNN reads as they are.
template <c10::DeviceType device, auto op, class Args>
auto attention_autocast(const Args& given) {
  constexpr auto key_of_device =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of_device);
  Args args = given;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (auto* tensor : {&args.query, &args.key, &args.value}) {
    *tensor = at::autocast::cached_cast(dtype, *tensor, device);
  }
  return op().call(args);
}

template <class Family>
void register_autograd(torch::Library& m) {
  m.impl(Family::kName, kernel<attention_autograd<Family>>);
  m.impl((std::string(Family::kName) + "_with_lse").c_str(),
         kernel<attention_with_lse_autograd<Family>>);
}

template <class Family, c10::DeviceType device>
void register_autocast(torch::Library& m) {
  using Args = typename Family::Args;
  m.impl(Family::kName, kernel<attention_autocast<device, Family::op, Args>>);
  m.impl((std::string(Family::kName) + "_with_lse").c_str(),
         kernel<attention_autocast<device, Family::with_lse_op, Args>>);
}

}  // namespace cudnn_ops
