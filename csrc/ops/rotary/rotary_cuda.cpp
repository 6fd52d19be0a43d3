// Rotary position embedding on CUDA.

#include "kernels/rotary.h"
#include "ops/or_none_cuda.h"
#include "ops/rotary/rotary.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

// [B, H, S, D], in memory [B, S, H, D]: made at once, without a view of another tensor.
at::Tensor empty_tokens_first(const at::Tensor& input) {
  const auto at_least_one = [&](int64_t dim) { return std::max<int64_t>(input.size(dim), 1); };
  const int64_t head = at_least_one(3), token = head * at_least_one(1);
  return at::detail::empty_strided_cuda(input.sizes(), {token * at_least_one(2), head, token, 1},
                                        input.scalar_type(), input.device());
}

RotaryResults rotary_cuda(const Rotary& args) {
  const auto& input = args.input;
  const auto& [cos, sin, positions, layout] = args.angles;
  check_rotary(args);
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble,
                   "cudnn_ops.rotary_embedding: input must be float16, bfloat16 or float32 on a "
                   "GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const at::Tensor out = empty_tokens_first(input);
  const bool is_plain = !args.key && !positions && layout.is_plain();
  if (is_plain) {
    if (input.numel() > 0) rotate(input, cos, sin, args.is_backward, out);
    return {out, or_none({}, input, input.scalar_type())};
  }
  const at::Tensor key = args.key.value_or(at::Tensor());
  const at::Tensor key_out = key.defined() ? empty_tokens_first(key) : at::Tensor();
  const int64_t size = layout.rotary_dim() == 0 ? input.size(3) : layout.rotary_dim();
  rotate_any(input, key,
             {cos, sin, positions.value_or(at::Tensor()), layout.sections(), size,
              layout.is_interleaved(), args.is_backward},
             out, key_out);
  return {out, or_none(key_out, input, input.scalar_type())};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_rotary", cudnn_ops::kernel<cudnn_ops::rotary_cuda>);
}
