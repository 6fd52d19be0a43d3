// Max pooling on CUDA, by kernels of ours.

#include "ops/image_order_cuda.h"
#include "ops/max_pool/max_pool.h"
#include "ops/or_none_cuda.h"

#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr int64_t kAlignment = 16;

void check_cuda_dtype(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() != at::kDouble, "cudnn_ops.max_pool2d: ", name,
                   " must be float16, bfloat16 or float32 on a GPU; got ", tensor.scalar_type());
}

at::Tensor prepared(const at::Tensor& image, bool is_last) {
  return aligned_in_order(in_order(image, is_last), is_last, kAlignment);
}

MaxPoolResults max_pool_cuda(const MaxPoolForward& args) {
  const MaxPool& pool = args.pool;
  const at::SymDimVector symbolic = max_pool_size(pool);
  const auto& input = pool.input;
  check_cuda_dtype(input, "input");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  const bool is_last = is_image_channels_last(input);
  const at::Tensor out = empty_in_order(sizes, input.scalar_type(), input.device(), is_last);
  at::Tensor offsets;
  if (args.with_offsets) offsets = empty_in_order(sizes, at::kByte, input.device(), is_last);
  if (input.numel() > 0) {
    max_pool_forward(prepared(input, is_last), is_last, pool.numbers.windows(), out, offsets);
  }
  return {out, or_none(offsets, input, at::kByte)};
}

at::Tensor max_pool_backward_cuda(const MaxPoolBackward& args) {
  check_max_pool_backward(args);
  const auto& grad_out = args.grad_out;
  check_cuda_dtype(grad_out, "grad_out");
  const c10::cuda::CUDAGuard device_guard(grad_out.device());
  const bool is_last = is_image_channels_last(args.offsets);
  const auto size = C10_AS_INTARRAYREF_SLOW(args.size);
  const at::Tensor grad_input =
      empty_in_order({grad_out.size(0), grad_out.size(1), size[0], size[1]}, grad_out.scalar_type(),
                     grad_out.device(), is_last);
  if (grad_out.numel() == 0) return grad_input;
  const at::Tensor grad = prepared(grad_out, is_last), offsets = prepared(args.offsets, is_last);
  std::optional<at::Tensor> more;
  if (args.grad_more) more = prepared(*args.grad_more, is_last);
  max_pool_backward({grad, offsets, more}, is_last, args.numbers.windows(), grad_input);
  return grad_input;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_max_pool2d", cudnn_ops::kernel<cudnn_ops::max_pool_cuda>);
  m.impl("_max_pool2d_backward", cudnn_ops::kernel<cudnn_ops::max_pool_backward_cuda>);
}
