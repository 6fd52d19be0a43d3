// Attention over a paged cache: what its files share. See cudnn_ops/ops/paged.py for the meaning
// of the arguments.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include <c10/core/SymInt.h>

namespace cudnn_ops {

// The arguments of a call, in the order of the schema.
struct Paged {
  const at::Tensor& query;                    // [B, Sq, H, D], or packed [total, H, D]
  const at::Tensor &key_cache, &value_cache;  // [pages, page size, Hkv, D], or heads first
  const at::Tensor& page_table;               // [B, width]
  const at::Tensor& seq_lens_kv;              // [B]
  const OptionalTensor& cu_seqlens_q;         // [B + 1], if packed
  c10::SymInt max_seqlen_q;                   // if packed
  std::optional<double> scale;
  bool is_causal;
  c10::IntArrayRef window_size;
  bool bottom_right;
  double softcap;
  const OptionalTensor& sinks;
  bool head_major;

  // The same with other queries, or sequences, which must outlive it.
  Paged with_query(const at::Tensor& other, const OptionalTensor& offsets) const {
    return with_sequences(other, offsets, page_table, seq_lens_kv);
  }
  Paged with_sequences(const at::Tensor& other, const OptionalTensor& offsets,
                       const at::Tensor& table, const at::Tensor& lengths) const {
    return {other, key_cache, value_cache, table,        lengths, offsets, max_seqlen_q,
            scale, is_causal, window_size, bottom_right, softcap, sinks,   head_major};
  }
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

void check_paged(const Paged& args);
void check_paged_out(const Paged& args, const at::Tensor& out);
void check_paged_append(const at::Tensor& key_cache, const at::Tensor& value_cache,
                        const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& slot_mapping, bool head_major);

template <class Result, Result (*body)(const Paged&)>
Result paged_kernel(const at::Tensor& query, const at::Tensor& key_cache,
                    const at::Tensor& value_cache, const at::Tensor& page_table,
                    const at::Tensor& seq_lens_kv, const OptionalTensor& cu_seqlens_q,
                    c10::SymInt max_seqlen_q, std::optional<double> scale, bool is_causal,
                    c10::IntArrayRef window_size, bool bottom_right, double softcap,
                    const OptionalTensor& sinks, bool head_major) {
  return body({query, key_cache, value_cache, page_table, seq_lens_kv, cu_seqlens_q,
               std::move(max_seqlen_q), scale, is_causal, window_size, bottom_right, softcap, sinks,
               head_major});
}

}  // namespace cudnn_ops
