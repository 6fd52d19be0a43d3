// Between the dispatcher's long lists of arguments and struct Varlen: the only place that spells
// the lists out.
#pragma once

#include "ops/attention/packed/varlen.h"

#include <utility>

namespace cudnn_ops {

template <class Result, Result (*body)(const Varlen&)>
Result varlen_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                     c10::SymInt max_seqlen_q, c10::SymInt max_seqlen_k, double dropout_p,
                     std::optional<double> scale, bool is_causal, c10::IntArrayRef window_size,
                     double softcap, const OptionalTensor& alibi_slopes,
                     const OptionalTensor& sinks, const OptionalTensor& seqused_q,
                     const OptionalTensor& seqused_k, bool bottom_right,
                     std::optional<bool> deterministic, const OptionalTensor& rng_state) {
  return body({query, key, value, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
               std::move(max_seqlen_k), dropout_p, scale, is_causal, window_size, softcap,
               alibi_slopes, sinks, seqused_q, seqused_k, bottom_right, deterministic, rng_state});
}

template <class Result, Result (*body)(c10::DispatchKeySet, const Varlen&)>
Result varlen_kernel(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& cu_seqlens_q,
                     const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
                     c10::SymInt max_seqlen_k, double dropout_p, std::optional<double> scale,
                     bool is_causal, c10::IntArrayRef window_size, double softcap,
                     const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                     const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
                     bool bottom_right, std::optional<bool> deterministic,
                     const OptionalTensor& rng_state) {
  return body(keys,
              {query, key, value, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
               std::move(max_seqlen_k), dropout_p, scale, is_causal, window_size, softcap,
               alibi_slopes, sinks, seqused_q, seqused_k, bottom_right, deterministic, rng_state});
}

template <VarlenGradients (*body)(const Varlen&, const VarlenGrad&)>
VarlenGradients varlen_backward_kernel(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
    c10::SymInt max_seqlen_k, double dropout_p, std::optional<double> scale, bool is_causal,
    c10::IntArrayRef window_size, double softcap, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    bool bottom_right, std::optional<bool> deterministic, const OptionalTensor& rng_state) {
  return body({query, key, value, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
               std::move(max_seqlen_k), dropout_p, scale, is_causal, window_size, softcap,
               alibi_slopes, sinks, seqused_q, seqused_k, bottom_right, deterministic, rng_state},
              {grad_out, out, lse});
}

template <VarlenGradients (*body)(c10::DispatchKeySet, const Varlen&, const VarlenGrad&)>
VarlenGradients varlen_backward_kernel(
    c10::DispatchKeySet keys, const at::Tensor& grad_out, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, c10::SymInt max_seqlen_q,
    c10::SymInt max_seqlen_k, double dropout_p, std::optional<double> scale, bool is_causal,
    c10::IntArrayRef window_size, double softcap, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& seqused_q, const OptionalTensor& seqused_k,
    bool bottom_right, std::optional<bool> deterministic, const OptionalTensor& rng_state) {
  return body(keys,
              {query, key, value, cu_seqlens_q, cu_seqlens_k, std::move(max_seqlen_q),
               std::move(max_seqlen_k), dropout_p, scale, is_causal, window_size, softcap,
               alibi_slopes, sinks, seqused_q, seqused_k, bottom_right, deterministic, rng_state},
              {grad_out, out, lse});
}

template <class Result>
Result call(const c10::TypedOperatorHandle<VarlenOp<Result>>& op, const Varlen& a) {
  return op.call(a.query, a.key, a.value, a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_q,
                 a.max_seqlen_k, a.dropout_p, a.scale, a.is_causal, a.window_size, a.softcap,
                 a.alibi_slopes, a.sinks, a.seqused_q, a.seqused_k, a.bottom_right, a.deterministic,
                 a.rng_state);
}

template <class Result>
Result redispatch(const c10::TypedOperatorHandle<VarlenOp<Result>>& op, c10::DispatchKeySet keys,
                  const Varlen& a) {
  return op.redispatch(keys, a.query, a.key, a.value, a.cu_seqlens_q, a.cu_seqlens_k,
                       a.max_seqlen_q, a.max_seqlen_k, a.dropout_p, a.scale, a.is_causal,
                       a.window_size, a.softcap, a.alibi_slopes, a.sinks, a.seqused_q, a.seqused_k,
                       a.bottom_right, a.deterministic, a.rng_state);
}

inline VarlenGradients call_backward(const Varlen& a, const VarlenGrad& grad) {
  return varlen_backward_op().call(grad.grad_out, a.query, a.key, a.value, grad.out, grad.lse,
                                   a.cu_seqlens_q, a.cu_seqlens_k, a.max_seqlen_q, a.max_seqlen_k,
                                   a.dropout_p, a.scale, a.is_causal, a.window_size, a.softcap,
                                   a.alibi_slopes, a.sinks, a.seqused_q, a.seqused_k,
                                   a.bottom_right, a.deterministic, a.rng_state);
}

inline VarlenGradients redispatch_backward(c10::DispatchKeySet keys, const Varlen& a,
                                           const VarlenGrad& grad) {
  return varlen_backward_op().redispatch(
      keys, grad.grad_out, a.query, a.key, a.value, grad.out, grad.lse, a.cu_seqlens_q,
      a.cu_seqlens_k, a.max_seqlen_q, a.max_seqlen_k, a.dropout_p, a.scale, a.is_causal,
      a.window_size, a.softcap, a.alibi_slopes, a.sinks, a.seqused_q, a.seqused_k, a.bottom_right,
      a.deterministic, a.rng_state);
}

}  // namespace cudnn_ops
