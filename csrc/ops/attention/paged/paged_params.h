// What a plan of attention over pages bakes in.
#pragma once

#include "ops/attention/attention_params.h"

namespace cudnn_ops {

// The caches are [pages, Hkv, page size, D] in whatever order they lie, the table [B, 1, width, 1].
// Queries are batched, with lengths (Sequences::kLengths), or packed (kRagged); the keys have
// lengths in either case.
struct PagedParams {
  static constexpr const char* kName = "paged_attention";
  graph::TensorDesc query, key_cache, value_cache, page_table, out;
  SdpaMask mask;
  bool with_lse = false;
  int64_t lse_stride = 0;  // as in SdpaForwardParams
  CUDNN_OPS_FIELDS(query, key_cache, value_cache, page_table, out, mask, with_lse, lse_stride)
};

// cuDNN has an engine for a single query a sequence that sees all keys.
inline bool is_decoding(const PagedParams& params) {
  return params.query.sizes[2] == 1 && params.mask.left == kUnbounded && !params.mask.has_softcap;
}

}  // namespace cudnn_ops
