// Writing new keys and values into a paged cache, by one kernel (paged_append.cu).

#include "ops/attention/paged/paged.h"
#include "paged_append_images.h"
#include "kernels/device_kernel.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_ops {
namespace {

constexpr int64_t kMaxThreads = 256, kWarp = 32;
constexpr int64_t kTokens = 4;  // of a block, as in paged_append.cu

// As in paged_append.cu.
struct Side {
  const void* tokens;
  void* cache;
  long long token_stride, token_head_stride;
  long long page_stride, slot_stride, head_stride;
  unsigned units;
};

// The largest power of 2, up to 16 bytes, that divides every address and stride of what is copied.
int64_t unit_of(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors) {
  int64_t unit = 16;
  for (const at::Tensor& tensor : tensors) {
    const int64_t element = tensor.element_size();
    const auto divide = [&](int64_t bytes) {
      while (bytes % unit != 0) unit /= 2;
    };
    divide(static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16));
    divide(tensor.size(-1) * element);
    for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) divide(tensor.stride(dim) * element);
  }
  return unit;
}

Side side_of(const at::Tensor& tokens, const at::Tensor& cache, bool head_major, int64_t unit) {
  const auto units = [&](int64_t elements) { return elements * tokens.element_size() / unit; };
  const int64_t slot_dim = head_major ? 2 : 1, head_dim = head_major ? 1 : 2;
  return {tokens.const_data_ptr(),       cache.mutable_data_ptr(),
          units(tokens.stride(0)),       units(tokens.stride(1)),
          units(cache.stride(0)),        units(cache.stride(slot_dim)),
          units(cache.stride(head_dim)), static_cast<unsigned>(units(tokens.size(2)))};
}

const DeviceKernel& kernel_of(int64_t unit) {
  static const std::array<DeviceKernel, 5> kernels{{{kPagedAppendImages, "paged_append_1"},
                                                    {kPagedAppendImages, "paged_append_2"},
                                                    {kPagedAppendImages, "paged_append_4"},
                                                    {kPagedAppendImages, "paged_append_8"},
                                                    {kPagedAppendImages, "paged_append_16"}}};
  size_t index = 0;
  while ((int64_t{1} << index) < unit) ++index;
  return kernels[index];
}

void append_cuda(const at::Tensor& key_cache, const at::Tensor& value_cache, const at::Tensor& key,
                 const at::Tensor& value, const at::Tensor& slot_mapping, bool head_major) {
  check_paged_append({key_cache, value_cache, key, value, slot_mapping, head_major});
  if (key.numel() + value.numel() == 0 || key_cache.size(0) == 0) return;
  const c10::cuda::CUDAGuard device_guard(key.device());
  const at::Tensor slots_of_tokens = slot_mapping.contiguous();
  const int64_t unit = unit_of({key_cache, value_cache, key, value});
  Side keys = side_of(key, key_cache, head_major, unit);
  Side values = side_of(value, value_cache, head_major, unit);
  const auto* mapping = slots_of_tokens.const_data_ptr<int64_t>();
  auto tokens = static_cast<unsigned>(key.size(0)), heads = static_cast<unsigned>(key.size(1));
  auto page_size = static_cast<unsigned>(key_cache.size(head_major ? 2 : 1));
  const int64_t all_slots = key_cache.size(0) * static_cast<int64_t>(page_size);
  TORCH_CHECK_VALUE(all_slots <= std::numeric_limits<uint32_t>::max(),
                    "cudnn_ops.paged_kv_append_: the caches have ", all_slots,
                    " slots, and at most 2^32 can be told apart");
  auto slots = static_cast<unsigned>(all_slots);
  std::array<void*, 7> arguments{&keys, &values, &mapping, &tokens, &heads, &page_size, &slots};
  const int64_t units = key.size(1) * std::max(keys.units, values.units);
  const int64_t threads = std::min(kMaxThreads, (units + kWarp - 1) / kWarp * kWarp);
  kernel_of(unit).launch((key.size(0) + kTokens - 1) / kTokens, 2, static_cast<int>(threads),
                         arguments.data());
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("paged_kv_append_", cudnn_ops::append_cuda);
}
