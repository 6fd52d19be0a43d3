// Merging attention over more keys into what is there, on CUDA.

#include "kernels/attention_merge.h"
#include "ops/attention/merge.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void merge_cuda(const AttentionMerge& args) {
  const auto& [out, lse, part, part_lse] = args;
  check_attention_merge(args);
  TORCH_CHECK_TYPE((part.scalar_type() == at::kHalf || part.scalar_type() == at::kBFloat16) &&
                       lse.scalar_type() == at::kFloat,
                   kMergeOp,
                   "part must be float16 or bfloat16 on a GPU, and lse "
                   "float32; got ",
                   part.scalar_type(), " and ", lse.scalar_type());
  if (lse.numel() == 0) return;
  TORCH_CHECK_VALUE(out.size(3) <= 1 || (out.stride(3) == 1 && part.stride(3) == 1), kMergeOp,
                    "out and part must have a last stride of "
                    "1, got ",
                    out.stride(3), " and ", part.stride(3));
  const c10::cuda::CUDAGuard device_guard(out.device());
  merge_attention(out, lse, part, part_lse);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_merge_attention_state_", cudnn_ops::kernel<cudnn_ops::merge_cuda>);
}
