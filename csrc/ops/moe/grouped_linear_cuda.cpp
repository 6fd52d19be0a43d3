// A linear layer for each group of rows on CUDA: by torch's grouped product, which is for bfloat16
// and for rows that its copies can address; else by a product for each group, for which the host
// waits for the offsets.

#include "graph/cuda_call.h"
#include "ops/moe/moe.h"
#include "ops/only_kernels.h"
#include "ops/or_none_cuda.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr int64_t kBytes = 16;
constexpr int64_t kLessGroups = 1024;  // than so many, for torch's grouped product

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kBytes == 0;
}

// Contiguous, and with the strides that say so: those of a single row may say anything.
at::Tensor as_dense(const at::Tensor& matrix) {
  at::Tensor dense = matrix.contiguous();
  return dense.size(0) == 1 ? dense.as_strided(dense.sizes(), {dense.size(1), 1}) : dense;
}

// Whether torch's grouped product takes the tensors as they are: contiguous ones.
bool has_grouped_product(const at::Tensor& rows, const at::Tensor& weight) {
  const auto is_whole = [&](int64_t columns) {
    return columns > 0 && columns * static_cast<int64_t>(rows.element_size()) % kBytes == 0;
  };
  return rows.scalar_type() == at::kBFloat16 && rows.size(0) > 0 && weight.size(0) > 0 &&
         weight.size(0) < kLessGroups && is_whole(weight.size(1)) && is_whole(weight.size(2)) &&
         is_aligned(rows) && is_aligned(weight);
}

// Calls `visit` with each group and its rows, where there are some.
template <class Visit>
void for_each_group(const GroupedLinear& args, const Visit& visit) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !graph::is_capturing(),
      "cudnn_ops.grouped_linear: in a CUDA graph input must be bfloat16, aligned to 16 bytes, with "
      "multiples of 8 for inputs and outputs; for ",
      args.input.scalar_type(), " with ", args.weight.size(2), " inputs and ", args.weight.size(1),
      " outputs the host has to wait for the offsets");
  const at::Tensor ends = args.offsets.cpu().contiguous();
  const auto* end = static_cast<const int32_t*>(ends.const_data_ptr());
  int64_t first = 0;
  for (int64_t group = 0; group < ends.numel(); ++group) {
    TORCH_CHECK_VALUE(first <= end[group] && end[group] <= args.input.size(0),
                      "cudnn_ops.grouped_linear: offsets must rise from 0 to at most the ",
                      args.input.size(0), " rows of input; it has ", end[group], " behind ", first);
    if (end[group] > first) visit(group, first, end[group] - first);
    first = end[group];
  }
}

at::Tensor zeros(c10::IntArrayRef sizes, const at::Tensor& like) {
  at::Tensor result =
      at::detail::empty_cuda(sizes, like.scalar_type(), like.device(), std::nullopt);
  return result.zero_();
}

void check_cuda_dtype(const at::Tensor& input) {
  TORCH_CHECK_TYPE(input.scalar_type() != at::kDouble,
                   "cudnn_ops.grouped_linear: input must be float16, bfloat16 or float32 on a GPU; "
                   "got float64");
}

at::Tensor grouped_linear_cuda(const GroupedLinear& args) {
  check_grouped_linear(args);
  check_cuda_dtype(args.input);
  const c10::cuda::CUDAGuard device_guard(args.input.device());
  const OnlyKernels guard;
  const at::Tensor rows = as_dense(args.input), weight = args.weight.contiguous();
  if (has_grouped_product(rows, weight)) {
    return at::_grouped_mm(rows, weight.transpose(1, 2), args.offsets.contiguous());
  }
  const at::Tensor out = zeros({rows.size(0), weight.size(1)}, rows);
  if (out.numel() == 0 || rows.size(1) == 0) return out;
  for_each_group(args, [&](int64_t group, int64_t first, int64_t count) {
    at::Tensor part = out.narrow(0, first, count);
    at::mm_out(part, rows.narrow(0, first, count), weight[group].t());
  });
  return out;
}

MoeGradients grouped_linear_backward_cuda(const GroupedLinearBackward& args) {
  const auto& mask = args.output_mask;
  check_grouped_linear_backward(args);
  check_cuda_dtype(args.grad_out);
  const c10::cuda::CUDAGuard device_guard(args.grad_out.device());
  const OnlyKernels guard;
  const at::Tensor grad = as_dense(args.grad_out), weight = args.forward.weight.contiguous();
  const at::Tensor rows = as_dense(args.forward.input);
  at::Tensor grad_rows, grad_weight;
  if (has_grouped_product(rows, weight) && is_aligned(grad)) {
    const at::Tensor offsets = args.forward.offsets.contiguous();
    if (mask[0]) grad_rows = at::_grouped_mm(grad, weight, offsets);
    if (mask[1]) grad_weight = at::_grouped_mm(grad.t(), rows, offsets);
  } else {
    if (mask[0]) grad_rows = zeros(rows.sizes(), rows);
    if (mask[1]) grad_weight = zeros(weight.sizes(), rows);
    const bool is_empty = grad.numel() == 0 || rows.size(1) == 0;
    if ((mask[0] || mask[1]) && !is_empty) {
      for_each_group(args.forward, [&](int64_t group, int64_t first, int64_t count) {
        const at::Tensor part = grad.narrow(0, first, count);
        if (mask[0]) {
          at::Tensor of_rows = grad_rows.narrow(0, first, count);
          at::mm_out(of_rows, part, weight[group]);
        }
        if (mask[1]) {
          at::Tensor of_weight = grad_weight[group];
          at::mm_out(of_weight, part.t(), rows.narrow(0, first, count));
        }
      });
    }
  }
  return {or_none(grad_rows, grad, grad.scalar_type()),
          or_none(grad_weight, grad, grad.scalar_type())};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("_grouped_linear", kernel<grouped_linear_cuda>);
  m.impl("_grouped_linear_backward", kernel<grouped_linear_backward_cuda>);
}
