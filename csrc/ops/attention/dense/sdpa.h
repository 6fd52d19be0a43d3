// Scaled dot-product attention: what its files share. See cudnn_ops/ops/sdpa.py for the
// meaning of the arguments and the formulas.
#pragma once

#include "graph/tensor_desc.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>

namespace cudnn_ops {

// cuDNN 9.19 computes the gradients of query and key wrongly, and says nothing, for what lies
// beyond 2^31 elements (measured on an H200, where torch's own cuDNN backend gives the same
// wrong numbers; the forward is right). Larger problems are computed in parts.
constexpr int64_t kMaxBackwardElements = int64_t{1} << 31;
// Its backward also launches a row of blocks for each batch entry and for each head, and CUDA
// takes no more rows than this.
constexpr int64_t kMaxBackwardRows = 65535;

using OptionalTensor = std::optional<at::Tensor>;

// The arguments of a call, in the order of the schema (sdpa_call.h takes them apart).
struct Attention {
  const at::Tensor &query, &key, &value;
  const OptionalTensor& attn_mask;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
  c10::IntArrayRef window_size;
  bool bottom_right;
  double softcap;
  const OptionalTensor &alibi_slopes, &sinks, &seq_lens_q, &seq_lens_kv;
  std::optional<bool> deterministic;
  const OptionalTensor& rng_state;
};

// Beside the arguments of the forward. `grad_mask` says whether the gradient of attn_mask is
// wanted; that of the sinks is given wherever there are sinks.
struct AttentionGrad {
  const at::Tensor &grad_out, &out, &lse;
  bool grad_mask;
};

// Raises ValueError, TypeError or NotImplementedError with a sentence that names the argument.
// Sizes may be symbolic: it serves the fake kernel as well as the real ones.
void check_sdpa(const Attention& args);
// The same but for the dtypes and head sizes that no GPU takes.
void check_sdpa_arguments(const Attention& args);
void check_sdpa_backward(const Attention& args, const AttentionGrad& grad);

// Strides of a dense tensor of `sizes` [B, H, S, D] whose first three dimensions lie in memory
// in the order of those of `like`, and whose last is contiguous.
std::array<int64_t, 4> dense_strides_like(c10::IntArrayRef sizes, const at::Tensor& like);

template <class Result>
using AttentionOp = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const OptionalTensor&, double, bool, std::optional<double>, bool,
                           c10::IntArrayRef, bool, double, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           std::optional<bool>, const OptionalTensor&);
using OutAndLse = std::tuple<at::Tensor, at::Tensor>;
// Of query, key, value, attn_mask and sinks; empty for the last two where they are not wanted.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using BackwardOp = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const at::Tensor&,
                             const OptionalTensor&, double, bool, std::optional<double>,
                             c10::IntArrayRef, bool, double, const OptionalTensor&,
                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                             std::optional<bool>, const OptionalTensor&, bool);
using RngStateOp = at::Tensor(const at::Tensor&, c10::SymInt, c10::SymInt);

const c10::TypedOperatorHandle<AttentionOp<at::Tensor>>& sdpa_op();
const c10::TypedOperatorHandle<AttentionOp<OutAndLse>>& sdpa_with_lse_op();
const c10::TypedOperatorHandle<BackwardOp>& sdpa_backward_op();
// Takes what a dropout over so many queries and keys needs from torch's generator of the query's
// device: seed and offset, int64 [2].
const c10::TypedOperatorHandle<RngStateOp>& attention_rng_state_op();

}  // namespace cudnn_ops
