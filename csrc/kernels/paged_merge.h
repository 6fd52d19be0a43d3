// What cuDNN's decoding engine leaves undone, by one kernel (paged_merge.cu): several queries a
// sequence that each see one key more than the one before, and sinks.
#pragma once

#include "ops/attention/paged/paged.h"

namespace cudnn_ops {

// The result over all but the last `hidden` keys of each sequence: [B, heads_kv * queries * group,
// value size] and, float32, [B, heads_kv * queries * group]; at least as many as there are queries.
struct PartialAttention {
  at::Tensor out, lse;
  int64_t hidden;
};

// Writes `out`, of the queries' sizes and contiguous, and where it is defined `lse`, [B, H, Sq].
// `query` are the queries of `args` as cuDNN got them, to be scaled by `scale`. Where there is one
// query, the partial result may be the memory that is written.
void merge_paged(const Paged& args, const at::Tensor& query, float scale,
                 const PartialAttention& partial, const at::Tensor& out, const at::Tensor& lse);

}  // namespace cudnn_ops
