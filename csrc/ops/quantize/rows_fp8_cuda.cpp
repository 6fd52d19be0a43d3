// Rows, normed or gated, rounded to 8 bits on CUDA.

#include "kernels/rows_fp8.h"
#include "ops/or_none_cuda.h"
#include "ops/quantize/rows_fp8.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

RowsFp8Results rows_fp8_cuda(const RowsFp8& args) {
  const auto& input = args.input;
  check_rows_fp8(args);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble, args.name(),
                   ": the input must be float16, bfloat16 or float32 on a GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const auto empty = [&](at::IntArrayRef sizes, at::ScalarType dtype) -> at::Tensor {
    return at::detail::empty_cuda(sizes, dtype, input.device(), std::nullopt);
  };
  c10::SmallVector<int64_t, 4> numbers{1};
  if (!args.scale) {
    numbers.assign(input.sizes().begin(), input.sizes().end());
    numbers.back() = 1;
  }
  const at::Tensor out = empty(input.sizes(), args.dtype);
  const at::Tensor descale = empty(numbers, at::kFloat), amax = empty(numbers, at::kFloat);
  const bool has_sum = args.is_norm() && args.other;
  const at::Tensor sum = has_sum ? empty(input.sizes(), input.scalar_type()) : at::Tensor();
  if (out.numel() > 0) {
    round_rows_to_fp8({args.name(), input, args.other, args.weight, args.scale, args.kind, args.eps,
                       args.zero_centered},
                      out, sum, descale, amax);
  } else {
    amax.zero_();
    if (args.scale) {
      descale.copy_(args.scale->view({1}).reciprocal());
    } else {
      descale.fill_(1.0);
    }
  }
  return {out, descale, amax, or_none(sum, input, input.scalar_type())};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_rows_fp8", cudnn_ops::kernel<cudnn_ops::rows_fp8_cuda>);
}
