// Rotary position embedding on CUDA.

#include "kernels/rotary.h"
#include "ops/rotary/rotary.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

at::Tensor rotary_cuda(const Rotary& args) {
  const auto& input = args.input;
  check_rotary(input, args.cos, args.sin);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble,
                   "cudnn_ops.rotary_embedding: input must be float16, bfloat16 or float32 on a "
                   "GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const at::Tensor out =
      at::detail::empty_cuda({input.size(0), input.size(2), input.size(1), input.size(3)},
                             input.scalar_type(), input.device(), std::nullopt);
  if (input.numel() > 0) rotate(input, args.cos, args.sin, args.is_backward, out);
  return out.transpose(1, 2);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_rotary", cudnn_ops::kernel<cudnn_ops::rotary_cuda>);
}
