// Scaled dot-product attention: its derivative and its autocast rule.

#include "autograd_node.h"
#include "sdpa.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <cmath>

namespace cudnn_ops {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct SdpaBackwardNode : public torch::autograd::Node {
  SavedVariable query, key, value, out, lse;
  bool is_causal = false;
  std::optional<double> scale;

  std::string name() const override {
    return "SdpaBackward";
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&query, &key, &value, &out, &lse}) saved->reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const at::Tensor grad_out = grads[0];
    const at::Tensor grad_lse = grads.size() > 1 ? grads[1] : at::Tensor();
    const auto self = owner_of(*this);
    const at::Tensor q = query.unpack(), k = key.unpack(), v = value.unpack();
    const at::Tensor o = out.unpack(self), l = lse.unpack(self);

    at::Tensor grad_query, grad_key, grad_value;
    if (grad_out.defined()) {
      std::tie(grad_query, grad_key, grad_value) =
          sdpa_backward_op().call(grad_out, q, k, v, o, l, is_causal, scale);
    }
    if (grad_lse.defined()) add_lse_gradient(grad_lse, q, k, l, grad_query, grad_key);
    variable_list result(3);
    if (task_should_compute_output(0)) result[0] = std::move(grad_query);
    if (task_should_compute_output(1)) result[1] = std::move(grad_key);
    if (task_should_compute_output(2)) result[2] = std::move(grad_value);
    return result;
  }

 private:
  // d lse_i / d score_ij is the probability P_ij, so with g the gradient of lse
  //   grad_query_i += scale * g_i * sum_j P_ij key_j     (attention with the keys as values)
  //   grad_key_j   += scale * sum_i P_ij g_i query_i     (its gradient for the values)
  // cuDNN's backward takes no gradient of lse, but it computes both sums exactly.
  void add_lse_gradient(const at::Tensor& grad_lse, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& l, at::Tensor& grad_query, at::Tensor& grad_key) const {
    const at::Tensor mean_key =
        sdpa_op().call(q, k, k, std::nullopt, 0.0, is_causal, scale, /*enable_gqa=*/true);
    const double factor = scale.value_or(
        1.0 / std::sqrt(static_cast<double>(q.sym_size(3).guard_int(__FILE__, __LINE__))));
    const at::Tensor weight = grad_lse.mul(factor).unsqueeze(-1);
    const at::Tensor query_part = weight.mul(mean_key).to(q.scalar_type());
    const at::Tensor weighted_query = weight.mul(q).to(q.scalar_type());
    const at::Tensor key_part = std::get<2>(
        sdpa_backward_op().call(weighted_query, q, k, k, mean_key, l, is_causal, scale));
    grad_query = grad_query.defined() ? grad_query.add(query_part) : query_part;
    grad_key = grad_key.defined() ? grad_key.add(key_part) : key_part;
  }
};

void refuse_forward_mode(std::initializer_list<std::reference_wrapper<const at::Tensor>> inputs) {
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(input),
                                "cudnn_ops.sdpa has no forward-mode derivative (jvp); use "
                                "reverse mode (backward, vjp, grad)");
  }
}

c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}

// Runs the forward that saves what the derivative needs, and attaches the Node to `out`, and
// to `lse` where the caller gets it.
std::tuple<at::Tensor, at::Tensor> forward_with_node(
    c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const std::optional<at::Tensor>& attn_mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa, bool returns_lse) {
  auto node = make_node<SdpaBackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(query, key, value));
  at::Tensor out, lse;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(out, lse) =
        sdpa_with_lse_op().redispatch(below_autograd(keys), query, key, value, attn_mask, dropout_p,
                                      is_causal, scale, enable_gqa);
  }
  torch::autograd::set_history(out, node);
  if (returns_lse) torch::autograd::set_history(lse, node);
  node->query = SavedVariable(query, /*is_output=*/false);
  node->key = SavedVariable(key, /*is_output=*/false);
  node->value = SavedVariable(value, /*is_output=*/false);
  node->out = SavedVariable(out, /*is_output=*/true);
  node->lse = SavedVariable(lse, /*is_output=*/returns_lse);
  node->is_causal = is_causal;
  node->scale = scale;
  return {std::move(out), std::move(lse)};
}

at::Tensor sdpa_autograd(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                         double dropout_p, bool is_causal, std::optional<double> scale,
                         bool enable_gqa) {
  refuse_forward_mode({query, key, value});
  if (torch::autograd::compute_requires_grad(query, key, value)) {
    return std::get<0>(forward_with_node(keys, query, key, value, attn_mask, dropout_p, is_causal,
                                         scale, enable_gqa, /*returns_lse=*/false));
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return sdpa_op().redispatch(below_autograd(keys), query, key, value, attn_mask, dropout_p,
                              is_causal, scale, enable_gqa);
}

std::tuple<at::Tensor, at::Tensor> sdpa_with_lse_autograd(
    c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const std::optional<at::Tensor>& attn_mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  refuse_forward_mode({query, key, value});
  if (torch::autograd::compute_requires_grad(query, key, value)) {
    return forward_with_node(keys, query, key, value, attn_mask, dropout_p, is_causal, scale,
                             enable_gqa, /*returns_lse=*/true);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return sdpa_with_lse_op().redispatch(below_autograd(keys), query, key, value, attn_mask,
                                       dropout_p, is_causal, scale, enable_gqa);
}

// cuDNN has no derivative of its attention backward: its results can be used, but asking for
// a gradient through them raises.
std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_out, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    bool is_causal, std::optional<double> scale) {
  std::tuple<at::Tensor, at::Tensor, at::Tensor> grads;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    grads = sdpa_backward_op().redispatch(below_autograd(keys), grad_out, query, key, value, out,
                                          lse, is_causal, scale);
  }
  if (torch::autograd::compute_requires_grad(grad_out, query, key, value, out, lse)) {
    auto node = make_node<torch::autograd::Error>(
        "cudnn_ops.sdpa: double backward is not available, cuDNN has no second derivative of "
        "attention; compute that part with torch.nn.functional.scaled_dot_product_attention "
        "under torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)",
        torch::autograd::collect_next_edges(grad_out, query, key, value, out, lse));
    std::apply([&](auto&... grad) { (torch::autograd::set_history(grad, node), ...); }, grads);
  }
  return grads;
}

// The rule that torch has for its own attention: what is float32 becomes the lower precision.
template <c10::DeviceType device, class Result>
Result sdpa_autocast(
    const c10::TypedOperatorHandle<Result(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                          const std::optional<at::Tensor>&, double, bool,
                                          std::optional<double>, bool)>& op,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa) {
  constexpr auto key_of_device =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of_device);
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  return op.call(cast(query), cast(key), cast(value), attn_mask, dropout_p, is_causal, scale,
                 enable_gqa);
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                    std::optional<double> scale, bool enable_gqa) {
    return sdpa_autocast<device>(sdpa_op(), query, key, value, attn_mask, dropout_p, is_causal,
                                 scale, enable_gqa);
  });
  m.impl("sdpa_with_lse",
         [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
            const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
            std::optional<double> scale, bool enable_gqa) {
           return sdpa_autocast<device>(sdpa_with_lse_op(), query, key, value, attn_mask, dropout_p,
                                        is_causal, scale, enable_gqa);
         });
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("sdpa", cudnn_ops::sdpa_autograd);
  m.impl("sdpa_with_lse", cudnn_ops::sdpa_with_lse_autograd);
  m.impl("_sdpa_backward", cudnn_ops::sdpa_backward_autograd);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<at::kCPU>(m);
}
