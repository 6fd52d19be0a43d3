// Attention over packed sequences: what its files share. See cudnn_ops/ops/varlen.py for the
// meaning of the arguments.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include <c10/core/SymInt.h>

namespace cudnn_ops {

// The arguments of a call, in the order of the schema (varlen_call.h takes them apart).
struct Varlen {
  const at::Tensor &query, &key, &value;          // [total, H, D]
  const at::Tensor &cu_seqlens_q, &cu_seqlens_k;  // [B + 1]
  c10::SymInt max_seqlen_q, max_seqlen_k;
  double dropout_p;
  std::optional<double> scale;
  bool is_causal;
  c10::IntArrayRef window_size;
  double softcap;
  const OptionalTensor &alibi_slopes, &sinks, &seqused_q, &seqused_k;
  bool bottom_right;
  std::optional<bool> deterministic;
  const OptionalTensor& rng_state;
};

struct VarlenGrad {
  const at::Tensor &grad_out, &out, &lse;
};

void check_varlen(const Varlen& args);

// As for dense attention (sdpa_regular.h), where only the rows can be irregular.
bool is_regular(const Varlen& args);
at::Tensor varlen_as_regular(const Varlen& given);
OutAndLse varlen_with_lse_as_regular(const Varlen& given);

template <class Result>
using VarlenOp = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const at::Tensor&, c10::SymInt, c10::SymInt, double, std::optional<double>,
                        bool, c10::IntArrayRef, double, const OptionalTensor&,
                        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, bool,
                        std::optional<bool>, const OptionalTensor&);
// Of query, key, value and sinks; empty for the last where there are none.
using VarlenGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using VarlenBackwardOp = VarlenGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor&, const at::Tensor&, c10::SymInt,
                                         c10::SymInt, double, std::optional<double>, bool,
                                         c10::IntArrayRef, double, const OptionalTensor&,
                                         const OptionalTensor&, const OptionalTensor&,
                                         const OptionalTensor&, bool, std::optional<bool>,
                                         const OptionalTensor&);

const c10::TypedOperatorHandle<VarlenOp<at::Tensor>>& varlen_op();
const c10::TypedOperatorHandle<VarlenOp<OutAndLse>>& varlen_with_lse_op();
const c10::TypedOperatorHandle<VarlenBackwardOp>& varlen_backward_op();

}  // namespace cudnn_ops
