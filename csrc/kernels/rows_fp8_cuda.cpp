#include "kernels/rows_fp8.h"

#include "rows_fp8_bfloat16_images.h"
#include "rows_fp8_float_images.h"
#include "rows_fp8_half_images.h"
#include "kernels/device_kernel.h"
#include "kernels/rows_fp8_call.h"
#include "kernels/tensor_rows.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace cudnn_ops {
namespace {

constexpr int64_t kBytes = 16, kWarp = 32, kMostThreads = 512, kVectors = 4;

const DeviceKernel& kernel_of(at::ScalarType dtype, bool is_wide, bool is_kept) {
#define CUDNN_OPS_ROWS_FP8(images)                            \
  {                                                           \
    {{images, "rows_fp8_n_any"}, {images, "rows_fp8_n_4"}}, { \
      {images, "rows_fp8_16_any"}, {images, "rows_fp8_16_4"}  \
    }                                                         \
  }
  static const DeviceKernel kernels[3][2][2] = {CUDNN_OPS_ROWS_FP8(kRowsFp8HalfImages),
                                                CUDNN_OPS_ROWS_FP8(kRowsFp8BFloat16Images),
                                                CUDNN_OPS_ROWS_FP8(kRowsFp8FloatImages)};
#undef CUDNN_OPS_ROWS_FP8
  return kernels[type_index(dtype)][is_wide][is_kept];
}

}  // namespace

void round_rows_to_fp8(const RowsOfFp8& args, const at::Tensor& out, const at::Tensor& sum,
                       const at::Tensor& descale, const at::Tensor& amax) {
  const int64_t columns = args.input.size(-1), rows = args.input.numel() / columns;
  TORCH_CHECK_VALUE(rows < INT32_MAX && columns < INT32_MAX, args.op,
                    ": no more than 2^31 rows, or numbers in a row; got ", rows, " of ", columns);
  const int64_t row_dims = args.input.dim() - 1;
  const TensorRows input(args.input, row_dims);
  const TensorRows other(args.other.value_or(at::Tensor()), row_dims);
  const at::Tensor weight = args.weight ? args.weight->contiguous() : at::Tensor();
  RowsFp8Call call{};
  call.input = input.get();
  call.other = other.get();
  if (weight.defined()) call.weight = weight.const_data_ptr();
  call.is_weight_float = weight.defined() && weight.scalar_type() == at::kFloat;
  call.out = out.mutable_data_ptr();
  if (sum.defined()) call.sum = sum.mutable_data_ptr();
  call.descale = descale.mutable_data_ptr<float>();
  call.amax = static_cast<unsigned*>(amax.mutable_data_ptr());
  call.rows = static_cast<unsigned>(rows);
  call.columns = static_cast<unsigned>(columns);
  call.kind = static_cast<RowsFp8Kind>(args.kind);
  call.eps = static_cast<float>(args.eps);
  call.zero_centered = args.zero_centered;
  call.is_e5m2 = out.scalar_type() == at::kFloat8_e5m2;
  if (args.scale) {
    call.scale = args.scale->const_data_ptr<float>();
    C10_CUDA_CHECK(cudaMemsetAsync(call.amax, 0, amax.nbytes(), c10::cuda::getCurrentCUDAStream()));
  }
  const auto element = static_cast<int64_t>(args.input.element_size());
  const uint64_t bits = input.address_bits() | other.address_bits() |
                        reinterpret_cast<uintptr_t>(call.weight) |
                        static_cast<uint64_t>(columns * element);
  const bool is_wide = bits % kBytes == 0;
  const int64_t pieces = is_wide ? columns * element / kBytes : columns;
  const bool is_kept = pieces <= kVectors * kMostThreads;
  const int64_t threads =
      is_kept ? divide_up(divide_up(pieces, kVectors), kWarp) * kWarp : kMostThreads;
  void* argument = &call;
  kernel_of(args.input.scalar_type(), is_wide, is_kept)
      .launch(rows, 1, static_cast<int>(threads), &argument);
}

}  // namespace cudnn_ops
