// From what torch's scaled_dot_product_attention takes to what the kernels do, and back: four
// dimensions, one batch size, as many heads as enable_gqa says, rows that lie in one piece and are
// multiples of 8 long. By differentiable operators, around the operator itself.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include <c10/util/SmallVector.h>

namespace cudnn_ops {

// Of one tensor: its last dimension. Of one that no kernel takes for another reason: true, for the
// checks to say it.
bool has_regular_rows(const at::Tensor& tensor);
// Padded with zeros to a multiple of 8, with a last stride of 1. The head size is then no symbol,
// for a scale that follows from it is none.
at::Tensor with_regular_rows(const at::Tensor& tensor);
// The scale that the rows of `query` had before they were padded.
std::optional<double> scale_of_rows(std::optional<double> scale, const at::Tensor& query);

// Whether the kernels take query, key and value as they are. A size that a compiler does not know
// counts as one that fits: check_sdpa holds it to that.
bool is_regular(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                bool enable_gqa);
inline bool is_regular(const Attention& args) {
  return is_regular(args.query, args.key, args.value, args.enable_gqa);
}
// Whether query, key and value are regular and fit each other, as nearly all do: in comparisons of
// integers alone, so no of what a compiler traces. A no needs check_shapes to say why, if at all.
bool fits_plainly(const Attention& args);

// A call that is not regular as one that is. `given` must stay alive.
class RegularAttention {
 public:
  // Raises where the tensors fit each other neither as they are nor broadcast.
  explicit RegularAttention(const Attention& given);

  // Valid as long as this object.
  Attention attention() const {
    return {query_,
            key_,
            value_,
            mask_,
            given_.dropout_p,
            given_.is_causal,
            scale_of_rows(given_.scale, given_.query),
            enable_gqa_,
            given_.window_size,
            given_.bottom_right,
            given_.softcap,
            given_.alibi_slopes,
            given_.sinks,
            given_.seq_lens_q,
            given_.seq_lens_kv,
            given_.deterministic,
            given_.rng_state};
  }
  // The results of that in the shapes that belong to `given`.
  at::Tensor out(const at::Tensor& regular) const;
  at::Tensor lse(const at::Tensor& regular) const;

 private:
  at::Tensor batched(at::Tensor tensor) const;
  at::Tensor unbatched(const at::Tensor& tensor) const;
  OptionalTensor mask_of_batch() const;
  void match_heads();

  const Attention& given_;
  int64_t rank_;                              // of the results
  c10::SmallVector<c10::SymInt, 4> leading_;  // their sizes before the heads
  at::Tensor query_, key_, value_;
  OptionalTensor mask_;
  bool enable_gqa_;
};

// The operators, on what is_regular says no to.
at::Tensor sdpa_as_regular(const Attention& given);
OutAndLse sdpa_with_lse_as_regular(const Attention& given);

}  // namespace cudnn_ops
