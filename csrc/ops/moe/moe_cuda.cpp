// Mixture of experts on CUDA: to the rows of the experts, and back.

#include "kernels/moe_order.h"
#include "kernels/moe_rows.h"
#include "ops/moe/moe.h"
#include "ops/or_none_cuda.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_cuda_dtype(const at::Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK_TYPE(tensor.scalar_type() != at::kDouble, op, ": ", name,
                   " must be float16, bfloat16 or float32 on a GPU; got float64");
}

at::Tensor empty(c10::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, dtype, like.device(), std::nullopt);
}

MoePermuted permute_cuda(const MoePermute& args) {
  const auto& [input, indices, num_experts] = args;
  check_moe_permute(args);
  check_cuda_dtype(input, "cudnn_ops.moe_permute", "input");
  const c10::cuda::CUDAGuard device_guard(input.device());
  const int64_t experts = num_experts.guard_int(__FILE__, __LINE__);
  const at::Tensor rows = empty({indices.numel(), input.size(1)}, input.scalar_type(), input);
  const at::Tensor offsets = empty({experts}, at::kInt, input);
  const at::Tensor positions = empty(indices.sizes(), at::kInt, input);
  if (indices.numel() == 0) {
    offsets.zero_();
  } else {
    order_by_expert(indices, experts, offsets, positions);
    if (rows.numel() > 0) scatter_tokens(input, positions, rows);
  }
  return {rows, offsets, positions};
}

at::Tensor combine_cuda(const MoeCombine& args) {
  const auto& [rows, positions, weights] = args;
  check_moe_combine(args);
  check_cuda_dtype(rows, "cudnn_ops.moe_combine", "rows");
  const c10::cuda::CUDAGuard device_guard(rows.device());
  const at::Tensor out = empty({positions.size(0), rows.size(1)}, rows.scalar_type(), rows);
  if (rows.numel() > 0) {
    combine_rows(rows, positions, weights.value_or(at::Tensor()), out);
  } else {
    out.zero_();  // sums of nothing
  }
  return out;
}

MoeGradients combine_backward_cuda(const MoeCombineBackward& args) {
  const auto& [grad_out, given_rows, positions, given_weights, mask] = args;
  check_moe_combine_backward(args);
  check_cuda_dtype(grad_out, "cudnn_ops.moe_combine backward", "grad_out");
  const c10::cuda::CUDAGuard device_guard(grad_out.device());
  const at::Tensor rows = given_rows.value_or(at::Tensor());
  const at::Tensor weights = given_weights.value_or(at::Tensor());
  at::Tensor grad_rows, grad_weights;
  if (mask[0]) {
    grad_rows = empty({positions.numel(), grad_out.size(1)}, grad_out.scalar_type(), grad_out);
  }
  if (mask[1]) grad_weights = empty(positions.sizes(), weights.scalar_type(), grad_out);
  if (positions.numel() == 0 || grad_out.size(1) == 0) {
    if (mask[1]) grad_weights.zero_();
  } else if (mask[1] || (mask[0] && weights.defined())) {
    combine_rows_backward(grad_out, rows, positions, weights, grad_rows, grad_weights);
  } else if (mask[0]) {
    scatter_tokens(grad_out, positions, grad_rows);
  }
  return {or_none(grad_rows, grad_out, grad_out.scalar_type()),
          or_none(grad_weights, grad_out, weights.defined() ? weights.scalar_type() : at::kFloat)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("_moe_permute", kernel<permute_cuda>);
  m.impl("_moe_combine", kernel<combine_cuda>);
  m.impl("_moe_combine_backward", kernel<combine_backward_cuda>);
}
