// Attention problems made from others: parts, and some with more queries. What a part leaves out,
// and what additional queries give, is for the caller to say.
#pragma once

#include "ops/attention/dense/sdpa.h"
#include "ops/attention/band.h"

#include <array>

namespace cudnn_ops {

enum class Along { kBatch, kKeyHeads, kQueries, kKeys };

// Some batch entries, heads, queries or keys: views of the tensors of `whole`, which must stay
// alive.
class AttentionPart {
 public:
  AttentionPart(const Attention& whole, Along along, int64_t start, int64_t size);

  // What the operators take. Valid as long as this object.
  Attention attention() const {
    return {query_,
            key_,
            value_,
            mask_,
            whole_.dropout_p,
            whole_.is_causal,
            whole_.scale,
            whole_.enable_gqa,
            whole_.window_size,
            whole_.bottom_right,
            whole_.softcap,
            alibi_slopes_,
            sinks_,
            seq_lens_q_,
            seq_lens_kv_,
            whole_.deterministic,
            whole_.rng_state};
  }

  // The same part of what lies as the query does (out, log-sum-exp), as the key does, as the mask.
  at::Tensor of_query(const at::Tensor& tensor) const;
  at::Tensor of_key(const at::Tensor& tensor) const;
  at::Tensor of_mask(const at::Tensor& tensor) const;
  at::Tensor of_heads(const at::Tensor& tensor) const;

 private:
  at::Tensor cut(const at::Tensor& tensor, int64_t dim, int64_t unit) const {
    return tensor.narrow(dim, start_ * unit, size_ * unit);
  }
  OptionalTensor cut_batch(const OptionalTensor& tensor) const;

  const Attention& whole_;
  Along along_;
  int64_t start_, size_;
  int64_t group_;  // query heads that share a key head
  at::Tensor query_, key_, value_;
  OptionalTensor mask_, alibi_slopes_, sinks_, seq_lens_q_, seq_lens_kv_;
};

// With zeros added to the queries, before the others, which moves the diagonal, or behind them, and
// with another band. `whole` must stay alive.
class AttentionWithMoreQueries {
 public:
  AttentionWithMoreQueries(const Attention& whole, int64_t before, int64_t behind,
                           const Band& band);

  Attention attention() const {
    return {query_,
            whole_.key,
            whole_.value,
            whole_.attn_mask,
            whole_.dropout_p,
            /*is_causal=*/false,
            whole_.scale,
            whole_.enable_gqa,
            window_size_,
            bottom_right_,
            whole_.softcap,
            whole_.alibi_slopes,
            whole_.sinks,
            seq_lens_q_,
            whole_.seq_lens_kv,
            whole_.deterministic,
            whole_.rng_state};
  }
  // Of what lies as the query does: the longer one, and back.
  at::Tensor longer(const at::Tensor& tensor) const;
  at::Tensor own(const at::Tensor& tensor) const {
    return tensor.narrow(2, before_, whole_.query.size(2));
  }

 private:
  const Attention& whole_;
  int64_t before_, behind_;
  std::array<int64_t, 2> window_size_;
  bool bottom_right_;
  at::Tensor query_;
  OptionalTensor seq_lens_q_;
};

}  // namespace cudnn_ops
