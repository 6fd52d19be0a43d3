// The operator that merges attention over more keys into what is there. The kernel for CUDA is in
// merge_cuda.cpp, those for CPUs and fake tensors are in cudnn_ops/ops/merge.py.

#include "ops/attention/merge.h"

#include <torch/library.h>

namespace cudnn_ops {

void check_attention_merge(const AttentionMerge& args) {
  const auto& [out, lse, part, part_lse] = args;
  TORCH_CHECK_VALUE(out.dim() == 4 && out.sym_sizes() == part.sym_sizes(), kMergeOp,
                    "out and part must be [batch, heads, length, head size] of one shape, got ",
                    out.sym_sizes(), " and ", part.sym_sizes());
  TORCH_CHECK_VALUE(
      lse.sym_sizes() == out.sym_sizes().slice(0, 3) && lse.sym_sizes() == part_lse.sym_sizes(),
      kMergeOp, "lse and part_lse must be ", out.sym_sizes().slice(0, 3), ", got ", lse.sym_sizes(),
      " and ", part_lse.sym_sizes());
  TORCH_CHECK_TYPE(lse.scalar_type() == part_lse.scalar_type(), kMergeOp, "lse is ",
                   lse.scalar_type(), " and part_lse ", part_lse.scalar_type());
  TORCH_CHECK_TYPE(
      out.scalar_type() == part.scalar_type() || out.scalar_type() == lse.scalar_type(), kMergeOp,
      "out must be of part's dtype, ", part.scalar_type(), ", or of lse's, ", lse.scalar_type(),
      "; got ", out.scalar_type());
  for (const at::Tensor* tensor : {&lse, &part, &part_lse}) {
    TORCH_CHECK_VALUE(tensor->device() == out.device(), kMergeOp, "all must be on one device, got ",
                      out.device(), " and ", tensor->device());
  }
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  m.def(
      "_merge_attention_state_(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()",
      tags);
  m.def("_merge_attention_check(Tensor out, Tensor lse, Tensor part, Tensor part_lse) -> ()",
        cudnn_ops::kernel<cudnn_ops::check_attention_merge>, tags);
}
