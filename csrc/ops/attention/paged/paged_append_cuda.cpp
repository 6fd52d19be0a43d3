// Writing new keys and values into a paged cache on CUDA.

#include "kernels/paged_append.h"
#include "ops/attention/paged/paged.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void append_cuda(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& key,
                 const at::Tensor& value, const at::Tensor& slot_mapping, bool head_major) {
  check_paged_append(key_cache, value_cache, key, value, slot_mapping, head_major);
  if (key.numel() + value.numel() == 0 || key_cache.size(0) == 0) return;
  const c10::cuda::CUDAGuard device_guard(key.device());
  append_to_pages(key_cache, value_cache, key, value, slot_mapping, head_major);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("paged_kv_append_", cudnn_ops::append_cuda);
}
