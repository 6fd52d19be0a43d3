// Scaled dot-product attention over batched tensors: what its files share. See
// cudnn_ops/ops/sdpa.py for the meaning of the arguments and the formulas.
#pragma once

#include "ops/attention/attention.h"

namespace cudnn_ops {

// The arguments of a call.
struct Sdpa : AttentionOptions {
  at::Tensor query, key, value;  // [B, H, S, D]
  OptionalTensor attn_mask;
  bool enable_gqa = true;  // the backward's heads were checked in the forward
  OptionalTensor seq_lens_q, seq_lens_kv;
  CUDNN_OPS_FIELDS(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                   window_size, bottom_right, softcap, alibi_slopes, sinks, seq_lens_q, seq_lens_kv,
                   deterministic, rng_state)
};

// `grad_mask` says whether the gradient of attn_mask is wanted; that of the sinks is computed
// wherever there are sinks.
struct SdpaBackward {
  Sdpa args;
  at::Tensor grad_out, out, lse;
  bool grad_mask = false;

  // The fields of the forward without enable_gqa, which is number 7.
  template <class Self>
  static auto fields(Self& self) {
    const auto forward = Sdpa::fields(self.args);
    return std::tuple_cat(std::tie(self.grad_out), first_fields<3>(forward),
                          std::tie(self.out, self.lse), other_fields<3>(first_fields<7>(forward)),
                          other_fields<8>(forward), std::tie(self.grad_mask));
  }
};

// The gradients of query, key, value, attn_mask and sinks; empty for the last two where they are
// not wanted.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

const Operator<at::Tensor, Sdpa>& sdpa_op();
const Operator<OutAndLse, Sdpa>& sdpa_with_lse_op();
const Operator<Gradients, SdpaBackward>& sdpa_backward_op();

// Raises ValueError, TypeError or NotImplementedError with a sentence that names the argument.
// Sizes may be symbolic: it serves the fake kernel as well as the real ones.
void check_sdpa(const Sdpa& args);
// The same but for the dtypes and head sizes that no GPU supports.
void check_sdpa_arguments(const Sdpa& args);
void check_sdpa_backward(const SdpaBackward& args);

}  // namespace cudnn_ops
