// From what torch's scaled_dot_product_attention accepts to what the kernels compute, and back:
// four dimensions, one batch size, as many heads as enable_gqa says, regular rows (layout.h). By
// differentiable operators, around the operator itself.
#pragma once

#include "ops/attention/dense/sdpa.h"

namespace cudnn_ops {

// Raises where query, key and value fit each other neither as they are nor broadcast.
void check_shapes(const Sdpa& args);
// `full`: what the mask has to broadcast to, [..., H, Sq, Skv].
void check_mask(const at::Tensor& mask, const at::Tensor& query, c10::SymIntArrayRef full);

// Whether the kernels support query, key and value as they are. A size that a compiler does not
// know counts as one that fits: check_sdpa holds it to that.
bool is_regular(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                bool enable_gqa);
inline bool is_regular(const Sdpa& args) {
  return is_regular(args.query, args.key, args.value, args.enable_gqa);
}
// Whether query, key and value are regular and fit each other, as nearly all do. It compares
// integers alone and is false for whatever a compiler traces. Where it is false, check_shapes tells
// why, if there is a reason.
bool fits_plainly(const Sdpa& args);

// A call that is not regular as one that is.
class RegularSdpa {
 public:
  explicit RegularSdpa(const Sdpa& given);

  const Sdpa& args() const {
    return args_;
  }
  // The results of that in the shapes that belong to the given call.
  at::Tensor out(const at::Tensor& regular) const;
  at::Tensor lse(const at::Tensor& regular) const;

 private:
  at::Tensor batched(at::Tensor tensor) const;
  at::Tensor unbatched(const at::Tensor& tensor) const;
  OptionalTensor mask_of_batch(const OptionalTensor& mask) const;
  void match_heads();

  at::Tensor given_value_;
  int64_t rank_;                              // of the results
  c10::SmallVector<c10::SymInt, 4> leading_;  // their sizes before the heads
  Sdpa args_;
};

// The operators, on what is_regular says no to.
at::Tensor sdpa_as_regular(const Sdpa& given);
OutAndLse sdpa_with_lse_as_regular(const Sdpa& given);

}  // namespace cudnn_ops
