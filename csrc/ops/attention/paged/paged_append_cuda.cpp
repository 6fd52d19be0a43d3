// Writing new keys and values into a paged cache on CUDA.

#include "kernels/paged_append.h"
#include "ops/attention/paged/paged.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void append_cuda(const PagedAppend& args) {
  check_paged_append(args);
  if (args.key.numel() + args.value.numel() == 0 || args.key_cache.size(0) == 0) return;
  const c10::cuda::CUDAGuard device_guard(args.key.device());
  append_to_pages(args.key_cache, args.value_cache, args.key, args.value, args.slot_mapping,
                  args.head_major, args.descale_k, args.descale_v);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("paged_kv_append_", cudnn_ops::kernel<cudnn_ops::append_cuda>);
}
