// Norm, rotation and rounding to 8 bits of query, key and value on CUDA.

#include "kernels/rotary_fp8.h"
#include "ops/rotary/rotary_fp8.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

// [B, H, S, D], in memory [B, S, H, D].
at::Tensor empty_tokens_first(const at::Tensor& input, at::ScalarType dtype) {
  const auto at_least_one = [&](int64_t dim) { return std::max<int64_t>(input.size(dim), 1); };
  const int64_t head = at_least_one(3), token = head * at_least_one(1);
  return at::detail::empty_strided_cuda(input.sizes(), {token * at_least_one(2), head, token, 1},
                                        dtype, input.device());
}

RotaryFp8Results rotary_fp8_cuda(const RotaryFp8& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  const auto& [cos, sin, positions, layout] = args.angles;
  check_rotary_fp8(args);
  TORCH_CHECK_TYPE(query.scalar_type() != at::kDouble,
                   "cudnn_ops.rotary_embedding_qkv_fp8: query must be float16, bfloat16 or float32 "
                   "on a GPU; got float64");
  const c10::cuda::CUDAGuard device_guard(query.device());
  const int64_t count = args.scale_count().expect_int();
  const auto numbers = [&]() -> at::Tensor {
    return at::detail::empty_cuda({count}, at::kFloat, query.device(), std::nullopt);
  };
  const RotaryFp8Results results{empty_tokens_first(query, args.dtype),
                                 empty_tokens_first(key, args.dtype),
                                 empty_tokens_first(value, args.dtype), numbers(), numbers()};
  const auto& [query_out, key_out, value_out, descale, amax] = results;
  const int64_t size = layout.rotary_dim() == 0 ? query.size(3) : layout.rotary_dim();
  rotate_to_fp8({query, key, value, args.query_weight, args.key_weight, args.scales, args.eps,
                 args.zero_centered},
                {cos, sin, positions.value_or(at::Tensor()), layout.sections(), size,
                 layout.is_interleaved(), /*is_backward=*/false},
                {query_out, key_out, value_out, descale, amax});
  return results;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_rotary_fp8", cudnn_ops::kernel<cudnn_ops::rotary_fp8_cuda>);
}
