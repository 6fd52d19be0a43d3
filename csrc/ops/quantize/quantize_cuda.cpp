// Rounding to 8 bits and back on CUDA.

#include "kernels/fp8.h"
#include "ops/quantize/quantize.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

at::Tensor empty_in_order(const at::Tensor& input, at::ScalarType dtype) {
  return at::empty_like(input, input.options().dtype(dtype), at::MemoryFormat::Preserve);
}

Quantized quantize_cuda(const Quantize& args) {
  const auto& input = args.input;
  check_quantize(args);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble,
                   "cudnn_ops.quantize_fp8: input must be float16, bfloat16 or float32 on a GPU; "
                   "got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const int64_t groups = args.dim ? input.size(*args.dim) : 1;
  const auto numbers = [&]() -> at::Tensor {
    return at::detail::empty_cuda({groups}, at::kFloat, input.device(), std::nullopt);
  };
  const at::Tensor out = empty_in_order(input, args.dtype), descale = numbers(), amax = numbers();
  if (input.numel() > 0) {
    round_to_fp8(input, args.scale, args.dim, args.power_of_two, out, descale, amax);
  } else {
    amax.zero_();
    if (args.scale) {
      descale.copy_(args.scale->view({groups}).reciprocal());
    } else {
      descale.fill_(1.0);
    }
  }
  return {out, descale, amax};
}

at::Tensor dequantize_cuda(const Dequantize& args) {
  check_dequantize(args);
  const c10::cuda::CUDAGuard device_guard(args.input.device());
  const at::Tensor out = empty_in_order(args.input, args.dtype);
  if (out.numel() > 0) widen_fp8(args.input, args.descale, args.dim, out);
  return out;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_quantize_fp8", cudnn_ops::kernel<cudnn_ops::quantize_cuda>);
  m.impl("_dequantize_fp8", cudnn_ops::kernel<cudnn_ops::dequantize_cuda>);
}
