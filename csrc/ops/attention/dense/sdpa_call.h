// Between the dispatcher's long lists of arguments and struct Attention: the only place that
// spells the lists out.
#pragma once

#include "ops/attention/dense/sdpa.h"

namespace cudnn_ops {

// A kernel for the dispatcher from one that takes the arguments together.
template <class Result, Result (*body)(const Attention&)>
Result attention_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                        std::optional<double> scale, bool enable_gqa, c10::IntArrayRef window_size,
                        bool bottom_right, double softcap, const OptionalTensor& alibi_slopes,
                        const OptionalTensor& sinks, const OptionalTensor& seq_lens_q,
                        const OptionalTensor& seq_lens_kv, std::optional<bool> deterministic,
                        const OptionalTensor& rng_state) {
  return body({query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window_size,
               bottom_right, softcap, alibi_slopes, sinks, seq_lens_q, seq_lens_kv, deterministic,
               rng_state});
}

template <class Result, Result (*body)(c10::DispatchKeySet, const Attention&)>
Result attention_kernel(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value, const OptionalTensor& attn_mask, double dropout_p,
                        bool is_causal, std::optional<double> scale, bool enable_gqa,
                        c10::IntArrayRef window_size, bool bottom_right, double softcap,
                        const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                        const OptionalTensor& seq_lens_q, const OptionalTensor& seq_lens_kv,
                        std::optional<bool> deterministic, const OptionalTensor& rng_state) {
  return body(keys, {query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                     window_size, bottom_right, softcap, alibi_slopes, sinks, seq_lens_q,
                     seq_lens_kv, deterministic, rng_state});
}

template <Gradients (*body)(const Attention&, const AttentionGrad&)>
Gradients backward_kernel(const at::Tensor& grad_out, const at::Tensor& query,
                          const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
                          const at::Tensor& lse, const OptionalTensor& attn_mask, double dropout_p,
                          bool is_causal, std::optional<double> scale, c10::IntArrayRef window_size,
                          bool bottom_right, double softcap, const OptionalTensor& alibi_slopes,
                          const OptionalTensor& sinks, const OptionalTensor& seq_lens_q,
                          const OptionalTensor& seq_lens_kv, std::optional<bool> deterministic,
                          const OptionalTensor& rng_state, bool grad_mask) {
  return body({query, key, value, attn_mask, dropout_p, is_causal, scale, /*enable_gqa=*/true,
               window_size, bottom_right, softcap, alibi_slopes, sinks, seq_lens_q, seq_lens_kv,
               deterministic, rng_state},
              {grad_out, out, lse, grad_mask});
}

template <Gradients (*body)(c10::DispatchKeySet, const Attention&, const AttentionGrad&)>
Gradients backward_kernel(c10::DispatchKeySet keys, const at::Tensor& grad_out,
                          const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const at::Tensor& out, const at::Tensor& lse,
                          const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                          std::optional<double> scale, c10::IntArrayRef window_size,
                          bool bottom_right, double softcap, const OptionalTensor& alibi_slopes,
                          const OptionalTensor& sinks, const OptionalTensor& seq_lens_q,
                          const OptionalTensor& seq_lens_kv, std::optional<bool> deterministic,
                          const OptionalTensor& rng_state, bool grad_mask) {
  return body(keys,
              {query, key, value, attn_mask, dropout_p, is_causal, scale, /*enable_gqa=*/true,
               window_size, bottom_right, softcap, alibi_slopes, sinks, seq_lens_q, seq_lens_kv,
               deterministic, rng_state},
              {grad_out, out, lse, grad_mask});
}

template <class Result>
Result call(const c10::TypedOperatorHandle<AttentionOp<Result>>& op, const Attention& a) {
  return op.call(a.query, a.key, a.value, a.attn_mask, a.dropout_p, a.is_causal, a.scale,
                 a.enable_gqa, a.window_size, a.bottom_right, a.softcap, a.alibi_slopes, a.sinks,
                 a.seq_lens_q, a.seq_lens_kv, a.deterministic, a.rng_state);
}

template <class Result>
Result redispatch(const c10::TypedOperatorHandle<AttentionOp<Result>>& op, c10::DispatchKeySet keys,
                  const Attention& a) {
  return op.redispatch(keys, a.query, a.key, a.value, a.attn_mask, a.dropout_p, a.is_causal,
                       a.scale, a.enable_gqa, a.window_size, a.bottom_right, a.softcap,
                       a.alibi_slopes, a.sinks, a.seq_lens_q, a.seq_lens_kv, a.deterministic,
                       a.rng_state);
}

inline Gradients call_backward(const Attention& a, const AttentionGrad& grad) {
  return sdpa_backward_op().call(grad.grad_out, a.query, a.key, a.value, grad.out, grad.lse,
                                 a.attn_mask, a.dropout_p, a.is_causal, a.scale, a.window_size,
                                 a.bottom_right, a.softcap, a.alibi_slopes, a.sinks, a.seq_lens_q,
                                 a.seq_lens_kv, a.deterministic, a.rng_state, grad.grad_mask);
}

inline Gradients redispatch_backward(c10::DispatchKeySet keys, const Attention& a,
                                     const AttentionGrad& grad) {
  return sdpa_backward_op().redispatch(
      keys, grad.grad_out, a.query, a.key, a.value, grad.out, grad.lse, a.attn_mask, a.dropout_p,
      a.is_causal, a.scale, a.window_size, a.bottom_right, a.softcap, a.alibi_slopes, a.sinks,
      a.seq_lens_q, a.seq_lens_kv, a.deterministic, a.rng_state, grad.grad_mask);
}

}  // namespace cudnn_ops
