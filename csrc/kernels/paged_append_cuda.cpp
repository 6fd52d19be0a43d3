#include "kernels/paged_append.h"

#include "kernels/device_kernel.h"
#include "kernels/paged_append_call.h"
#include "paged_append_images.h"

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_ops {
namespace {

constexpr int64_t kMaxThreads = 256, kWarp = 32;

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

// Whether addresses and strides of what is rounded are multiples of so many numbers.
bool fits(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors, int64_t width) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    bool is_multiple = address % static_cast<uintptr_t>(width * tensor.element_size()) == 0 &&
                       tensor.size(-1) % width == 0;
    for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) {
      is_multiple = is_multiple && tensor.stride(dim) % width == 0;
    }
    return is_multiple;
  });
}

// Units are of `unit`, numbers of `size`.
PagedAppendSide side_of(const at::Tensor& tokens, const at::Tensor& cache, bool head_major,
                        int64_t size, int64_t unit, const std::optional<at::Tensor>& descale) {
  const auto units = [&](int64_t numbers) { return numbers * size / unit; };
  const int64_t slot_dim = head_major ? 2 : 1, head_dim = head_major ? 1 : 2;
  return {tokens.const_data_ptr(),
          cache.mutable_data_ptr(),
          units(tokens.stride(0)),
          units(tokens.stride(1)),
          units(cache.stride(0)),
          units(cache.stride(slot_dim)),
          units(cache.stride(head_dim)),
          static_cast<unsigned>(units(tokens.size(2))),
          descale ? descale->const_data_ptr<float>() : nullptr,
          descale && descale->numel() > 1 ? static_cast<unsigned>(descale->stride(0)) : 0};
}

// That copies so many bytes at once.
const DeviceKernel& copying_kernel(int64_t unit) {
  static const std::array<DeviceKernel, 5> kernels{{{kPagedAppendImages, "paged_append_1"},
                                                    {kPagedAppendImages, "paged_append_2"},
                                                    {kPagedAppendImages, "paged_append_4"},
                                                    {kPagedAppendImages, "paged_append_8"},
                                                    {kPagedAppendImages, "paged_append_16"}}};
  size_t index = 0;
  while ((int64_t{1} << index) < unit) ++index;
  return kernels[index];
}

const DeviceKernel& rounding_kernel(at::ScalarType dtype, bool is_wide) {
  static const DeviceKernel kernels[3][2] = {
      {{kPagedAppendImages, "paged_append_half_1"}, {kPagedAppendImages, "paged_append_half_8"}},
      {{kPagedAppendImages, "paged_append_bfloat16_1"},
       {kPagedAppendImages, "paged_append_bfloat16_8"}},
      {{kPagedAppendImages, "paged_append_float_1"}, {kPagedAppendImages, "paged_append_float_4"}}};
  return kernels[type_index(dtype)][is_wide];
}

}  // namespace

void append_to_pages(const at::Tensor& key_cache, const at::Tensor& value_cache,
                     const at::Tensor& key, const at::Tensor& value, const at::Tensor& slot_mapping,
                     bool head_major, const std::optional<at::Tensor>& descale_k,
                     const std::optional<at::Tensor>& descale_v) {
  const at::Tensor slots_of_tokens = slot_mapping.contiguous();
  const int64_t page_size = key_cache.size(head_major ? 2 : 1);
  const int64_t slots = key_cache.size(0) * page_size;
  TORCH_CHECK_VALUE(slots <= std::numeric_limits<uint32_t>::max(),
                    "cudnn_ops.paged_kv_append_: the caches have ", slots,
                    " slots, and at most 2^32 can be told apart");
  const bool is_rounded = key.scalar_type() != key_cache.scalar_type();
  const int64_t widest = 16 / static_cast<int64_t>(key.element_size());
  const bool is_wide = is_rounded && fits({key_cache, value_cache, key, value}, widest);
  const int64_t size = is_rounded ? 1 : static_cast<int64_t>(key.element_size());
  int64_t unit = is_wide ? widest : 1;
  if (!is_rounded) unit = unit_of({key_cache, value_cache, key, value});
  PagedAppendCall call{
      side_of(key, key_cache, head_major, size, unit, descale_k),
      side_of(value, value_cache, head_major, size, unit, descale_v),
      static_cast<const long long*>(slots_of_tokens.const_data_ptr()),
      static_cast<unsigned>(key.size(0)),
      static_cast<unsigned>(key.size(1)),
      static_cast<unsigned>(page_size),
      static_cast<unsigned>(slots),
  };
  const int64_t units = key.size(1) * std::max(call.key.units, call.value.units);
  const int64_t threads = std::min(kMaxThreads, (units + kWarp - 1) / kWarp * kWarp);
  const DeviceKernel& kernel =
      is_rounded ? rounding_kernel(key.scalar_type(), is_wide) : copying_kernel(unit);
  void* argument = &call;
  kernel.launch((key.size(0) + kAppendedTokens - 1) / kAppendedTokens, 2, static_cast<int>(threads),
                &argument);
}

}  // namespace cudnn_ops
