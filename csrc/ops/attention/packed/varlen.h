// Attention over packed sequences: what its files share. See cudnn_ops/ops/varlen.py for the
// meaning of the arguments.
#pragma once

#include "ops/attention/attention.h"

namespace cudnn_ops {

// The arguments of a call.
struct Varlen : AttentionOptions {
  at::Tensor query, key, value;           // [total, H, D]
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // [B + 1]
  c10::SymInt max_seqlen_q, max_seqlen_k;
  OptionalTensor seqused_q, seqused_k;  // [B]
  CUDNN_OPS_FIELDS(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                   dropout_p, scale, is_causal, window_size, softcap, alibi_slopes, sinks,
                   seqused_q, seqused_k, bottom_right, deterministic, rng_state)
};

struct VarlenBackward {
  Varlen args;
  at::Tensor grad_out, out, lse;

  template <class Self>
  static auto fields(Self& self) {
    const auto forward = Varlen::fields(self.args);
    return std::tuple_cat(std::tie(self.grad_out), first_fields<3>(forward),
                          std::tie(self.out, self.lse), other_fields<3>(forward));
  }
};

// The gradients of query, key, value and sinks; empty for the sinks where there are none.
using VarlenGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

const Operator<at::Tensor, Varlen>& varlen_op();
const Operator<OutAndLse, Varlen>& varlen_with_lse_op();
const Operator<VarlenGradients, VarlenBackward>& varlen_backward_op();

void check_varlen(const Varlen& args);
// The same for another operator on packed sequences, whose name `op` begins messages; `check` is
// called with query, key and value: their dtypes and head sizes.
using CheckOperand = void (*)(const at::Tensor& tensor, const char* name, const char* op);
void check_packed_call(const Varlen& args, const char* op, CheckOperand check);

// Whether the rows are regular (layout.h), and the operators on tensors whose rows are not.
bool is_regular(const Varlen& args);
at::Tensor varlen_as_regular(const Varlen& given);
OutAndLse varlen_with_lse_as_regular(const Varlen& given);

}  // namespace cudnn_ops
