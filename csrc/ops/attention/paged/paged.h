// Attention over a paged cache: what its files share. See cudnn_ops/ops/paged.py for the meaning
// of the arguments.
#pragma once

#include "ops/attention/attention.h"

namespace cudnn_ops {

// The arguments of a call; the other options of attention have no place here.
struct Paged : AttentionOptions {
  at::Tensor query;                   // [B, Sq, H, D], or packed [total, H, D]
  at::Tensor key_cache, value_cache;  // [pages, page size, Hkv, D], or heads first
  at::Tensor page_table;              // [B, width]
  at::Tensor seq_lens_kv;             // [B]
  OptionalTensor cu_seqlens_q;        // [B + 1], if packed
  c10::SymInt max_seqlen_q;           // if packed
  bool head_major = false;
  CUDNN_OPS_FIELDS(query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q,
                   max_seqlen_q, scale, is_causal, window_size, bottom_right, softcap, sinks,
                   head_major)

  bool is_packed() const {
    return cu_seqlens_q.has_value();
  }
  bool has_one_query_each() const {
    if (!is_packed()) return query.sym_size(1) == 1;
    return max_seqlen_q == 1 && query.sym_size(0) == page_table.sym_size(0);
  }
  // Where the tokens and the heads of a page are.
  int64_t token_dim() const {
    return head_major ? 2 : 1;
  }
  int64_t head_dim() const {
    return head_major ? 1 : 2;
  }
};

// With the tensor that the result is written to: at::Tensor, or of the check alone OptionalTensor.
template <class Out>
struct PagedInto {
  Paged args;
  Out out;
  CUDNN_OPS_FIELDS(args, out)
};

struct PagedAppend {
  at::Tensor key_cache, value_cache;
  at::Tensor key, value;    // [tokens, Hkv, D]
  at::Tensor slot_mapping;  // int64 [tokens]
  bool head_major = false;
  CUDNN_OPS_FIELDS(key_cache, value_cache, key, value, slot_mapping, head_major)
};

const Operator<at::Tensor, Paged>& paged_op();
const Operator<OutAndLse, Paged>& paged_with_lse_op();

void check_paged(const Paged& args);
void check_paged_out(const Paged& args, const at::Tensor& out);
void check_paged_append(const PagedAppend& args);

}  // namespace cudnn_ops
