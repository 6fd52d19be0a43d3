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
  OptionalTensor descale_k, descale_v;  // of caches of 8 bits: float32, one or [Hkv]
  OptionalTensor plan;                  // as paged_plan makes it
  CUDNN_OPS_FIELDS(query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q,
                   max_seqlen_q, scale, is_causal, window_size, bottom_right, softcap, sinks,
                   head_major, descale_k, descale_v, plan)

  bool is_packed() const {
    return cu_seqlens_q.has_value();
  }
  bool has_one_query_each() const {
    if (!is_packed()) return query.sym_size(1) == 1;
    return max_seqlen_q == 1 && query.sym_size(0) == page_table.sym_size(0);
  }
  bool has_fp8_cache() const {
    return key_cache.scalar_type() == at::kFloat8_e4m3fn;
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
  OptionalTensor descale_k, descale_v;  // of caches of 8 bits: float32, one or [Hkv]
  CUDNN_OPS_FIELDS(key_cache, value_cache, key, value, slot_mapping, head_major, descale_k,
                   descale_v)

  // Whether the tokens are rounded to 8 bits on their way.
  bool is_rounded() const {
    return key_cache.scalar_type() == at::kFloat8_e4m3fn && key.scalar_type() != at::kFloat8_e4m3fn;
  }
};

// Equal parts of the work of decoding, for sequences of these lengths.
struct PagedPlan : AttentionOptions {
  at::Tensor seq_lens_kv;       // [B]
  OptionalTensor cu_seqlens_q;  // [B + 1], if packed
  c10::SymInt queries;          // of each sequence, or if packed at most
  c10::SymInt group;            // query heads of a key head
  CUDNN_OPS_FIELDS(seq_lens_kv, cu_seqlens_q, queries, group, is_causal, window_size, bottom_right)
};

const Operator<at::Tensor, Paged>& paged_op();
const Operator<OutAndLse, Paged>& paged_with_lse_op();

void check_paged(const Paged& args);
void check_paged_out(const Paged& args, const at::Tensor& out);
void check_paged_append(const PagedAppend& args);
void check_paged_plan(const PagedPlan& args);
// The length of a plan for so many sequences.
c10::SymInt paged_plan_size(const c10::SymInt& batch);

}  // namespace cudnn_ops
