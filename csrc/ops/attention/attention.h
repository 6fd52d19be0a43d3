// What the attention operators, dense (dense/), packed (packed/) and paged (paged/), are called
// with alike. See cudnn_ops/ops/sdpa.py for the meaning of the options and the formulas.
#pragma once

#include "ops/operator.h"

#include <c10/core/SymInt.h>

namespace cudnn_ops {

// cuDNN 9.19 computes the gradients of query and key wrongly, and says nothing, for what lies
// beyond 2^31 elements (measured on an H200, where torch's own cuDNN backend gives the same
// wrong numbers; the forward is right). Larger problems are computed in parts.
constexpr int64_t kMaxBackwardElements = int64_t{1} << 31;
// Its backward also launches a row of blocks for each batch entry and for each head, and CUDA
// allows no more rows than this.
constexpr int64_t kMaxBackwardRows = 65535;

// A new option is a member here and a field of each operator that has it (`fields` of Sdpa, Varlen
// and Paged, in the order of the schema).
struct AttentionOptions {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  c10::SmallVector<int64_t, 2> window_size;  // left, right
  bool bottom_right = false;
  double softcap = 0;
  OptionalTensor alibi_slopes, sinks;  // [Hq]
  std::optional<bool> deterministic;
  OptionalTensor rng_state;  // seed and offset, int64 [2]
};

// What the caller says, or torch.use_deterministic_algorithms.
bool is_deterministic(const AttentionOptions& options);

using OutAndLse = std::tuple<at::Tensor, at::Tensor>;

// The seed and offset, int64 [2], that a dropout over so many queries and keys takes from torch's
// generator of the query's device.
struct RngState {
  at::Tensor query;
  c10::SymInt length, length_kv;
  CUDNN_OPS_FIELDS(query, length, length_kv)
};
const Operator<at::Tensor, RngState>& attention_rng_state_op();

}  // namespace cudnn_ops
