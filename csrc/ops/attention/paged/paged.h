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

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.query, self.key_cache, self.value_cache, self.page_table, self.seq_lens_kv,
                    self.cu_seqlens_q, self.max_seqlen_q, self.scale, self.is_causal,
                    self.window_size, self.bottom_right, self.softcap, self.sinks, self.head_major);
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

// With the tensor that the result is written to: at::Tensor, or of the check alone OptionalTensor.
template <class Out>
struct PagedInto {
  Paged args;
  Out out;

  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(Paged::fields(self.args), std::tie(self.out));
  }
};

struct PagedAppend {
  at::Tensor key_cache, value_cache;
  at::Tensor key, value;    // [tokens, Hkv, D]
  at::Tensor slot_mapping;  // int64 [tokens]
  bool head_major = false;

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.key_cache, self.value_cache, self.key, self.value, self.slot_mapping,
                    self.head_major);
  }
};

const Operator<at::Tensor, Paged>& paged_op();
const Operator<OutAndLse, Paged>& paged_with_lse_op();

void check_paged(const Paged& args);
void check_paged_out(const Paged& args, const at::Tensor& out);
void check_paged_append(const PagedAppend& args);

}  // namespace cudnn_ops
