// What cuDNN's decoding engine does not compute, by one kernel (paged_merge.cu): sequences with
// several queries, each of which sees one key more than the one before, and sinks.
#pragma once

#include <ATen/core/Tensor.h>

namespace cudnn_ops {

// The result over all but the last `hidden` keys of each sequence: [B, heads_kv * queries * group,
// value size] and, float32, [B, heads_kv * queries * group]; at least as many as there are queries.
struct PartialAttention {
  at::Tensor out, lse;
  int64_t hidden;
};

// The rest of a call.
struct PagedMerge {
  const at::Tensor& query;                    // [B, Sq, H, D], as the partial result's plan got it
  const at::Tensor &key_cache, &value_cache;  // [pages, page size, Hkv, D]; head_major: heads first
  const at::Tensor &page_table, &seq_lens_kv;
  const std::optional<at::Tensor>& sinks;
  bool head_major;
  float scale;  // of the scores of `query`
  float softcap;
};

// Writes `out`, of the queries' sizes and contiguous, and where it is defined `lse`, [B, H, Sq].
// With one query per sequence the partial result may lie where these are written. On the current
// device and stream.
void merge_paged(const PagedMerge& args, const PartialAttention& partial, const at::Tensor& out,
                 const at::Tensor& lse);

}  // namespace cudnn_ops
