#include "kernels/rotary_fp8.h"

#include "rotary_fp8_images.h"
#include "kernels/device_kernel.h"
#include "kernels/rotary_any.h"
#include "kernels/rotary_fp8_call.h"
#include "kernels/tensor_rows.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr int64_t kThreads = 256;

#define ROTARY_FP8_KERNELS(kind, width, float_width)                                      \
  {                                                                                       \
    {kRotaryFp8Images, kind "half_" width}, {kRotaryFp8Images, kind "half_float_" width}, \
        {kRotaryFp8Images, kind "bfloat16_" width},                                       \
        {kRotaryFp8Images, kind "bfloat16_float_" width}, {                               \
      kRotaryFp8Images, kind "float_" float_width                                         \
    }                                                                                     \
  }

at::Tensor dense(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

const void* data_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The threads that share a row of so many items.
unsigned group_of(unsigned items, unsigned items_of_thread) {
  unsigned group = 1;
  while (group * items_of_thread < items) group *= 2;
  return group;
}

}  // namespace

void rotate_to_fp8(const RotaryFp8Input& input, const RotaryTurn& turn,
                   const RotaryFp8Output& output) {
  constexpr unsigned kNarrowItems = 4;  // of a thread, as in the kernel
  const at::Tensor v = with_dense_last(input.value);
  const at::Tensor query_weight = dense(input.query_weight), key_weight = dense(input.key_weight);
  const at::Tensor scales = dense(input.scales);
  const int64_t value_size = v.size(3), widest = 16 / static_cast<int64_t>(v.element_size());
  const auto is_aligned = [](const at::Tensor& weight) {
    return !weight.defined() || are_rows_aligned(weight);
  };
  const bool may_be_wide = value_size % widest == 0 && are_rows_aligned(v) &&
                           is_aligned(query_weight) && is_aligned(key_weight);
  const RotaryAny any(input.query, input.key, turn, output.query, output.key, may_be_wide);
  RotaryFp8Call call{};
  call.turn = any.call;
  call.value = heads_of(v, output.value);
  call.query_weight = data_of(query_weight);
  call.key_weight = data_of(key_weight);
  call.amax = static_cast<unsigned*>(output.amax.mutable_data_ptr());
  const int64_t heads = int64_t{any.call.query.heads} + any.call.key.heads + call.value.heads;
  call.rows = any.q.size(0) * any.q.size(2) * heads;
  call.value_pieces = static_cast<unsigned>(value_size / any.width);
  call.value_scales = static_cast<unsigned>(output.amax.numel() - 2);
  call.group = group_of(std::max(any.call.row_items, (call.value_pieces + 1) / 2),
                        any.is_wide ? 1 : kNarrowItems);
  call.size = static_cast<float>(any.q.size(3));
  call.eps = static_cast<float>(input.eps);
  call.zero_centered = input.zero_centered;
  const at::Tensor& weight = query_weight.defined() ? query_weight : key_weight;
  call.is_weight_float = weight.defined() && weight.scalar_type() == at::kFloat;
  call.is_e5m2 = output.query.scalar_type() == at::kFloat8_e5m2;
  using Kernels = DeviceKernel[5];
  static const Kernels narrow = ROTARY_FP8_KERNELS("rotary_fp8_", "1", "1");
  static const Kernels wide = ROTARY_FP8_KERNELS("rotary_fp8_", "8", "4");
  static const Kernels wide_pairs = ROTARY_FP8_KERNELS("rotary_fp8_pairs_", "8", "4");
  const Kernels& kernels = !any.is_wide ? narrow : turn.is_interleaved ? wide_pairs : wide;
  const DeviceKernel& kernel = kernels[rotary_kernel_index(any.q, any.c)];
  // No more blocks than run at the same time: each of them has a word with the largest magnitudes.
  // As many as have a row of each head, though, and one where there is no row, for the descales.
  const int64_t rows_of_block = kThreads / call.group;
  const int64_t least = std::max<int64_t>(1, call.rows > 0 ? divide_up(heads, rows_of_block) : 0);
  const int64_t blocks = std::max(
      least, std::min(divide_up(call.rows, rows_of_block), kernel.resident_blocks(kThreads, 0)));
  const auto launch = [&] {
    void* argument = &call;
    kernel.launch(blocks, 1, kThreads, &argument);
  };
  C10_CUDA_CHECK(
      cudaMemsetAsync(call.amax, 0, output.amax.nbytes(), c10::cuda::getCurrentCUDAStream()));
  if (scales.defined()) {
    call.scales = scales.const_data_ptr<float>();
  } else {
    launch();
  }
  call.descales = output.descale.mutable_data_ptr<float>();
  launch();
}

}  // namespace cudnn_ops
