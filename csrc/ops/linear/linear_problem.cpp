#include "ops/linear/linear_problem.h"

#include <ATen/Context.h>

#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// As a batch of one.
TensorDesc batch_desc(c10::ScalarType dtype, int64_t rows, int64_t columns, int64_t row_stride) {
  return {dtype, {1, rows, columns}, {rows * row_stride, row_stride, 1}};
}

TensorDesc dense_desc(c10::ScalarType dtype, int64_t rows, int64_t columns) {
  return batch_desc(dtype, rows, columns, columns);
}

// Of a matrix with a unit last stride. The stride of a single row or column addresses nothing.
TensorDesc desc_of(const at::Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  return batch_desc(matrix.scalar_type(), rows, columns, rows == 1 ? columns : matrix.stride(0));
}

std::string_view reason_of(const at::Tensor& left, const at::Tensor& right, int64_t columns) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto dtype = left.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    return "cuDNN's graphs of linear layers support float16 and bfloat16";
  }
  if (left.numel() == 0 || right.numel() == 0) return "nothing needs no plan";
  const auto bytes = columns * static_cast<int64_t>(left.element_size());
  if (!graph::is_addressable(left) || !graph::is_addressable(right) ||
      bytes % TensorDesc::kAlignment != 0) {
    return "cuDNN's graph requires rows that start at multiples of 16 bytes";
  }
  if (left.numel() > kMost || right.numel() > kMost || left.size(0) > kMost / columns) {
    return "a matrix has 2^31 elements or more, for which no graph is made";
  }
  return {};
}

}  // namespace

std::string_view reason_for_no_plan(const Linear& args) {
  return reason_of(args.input, args.weight, args.weight.size(0));
}

std::string_view reason_for_no_plan(const HiddenGradient& args) {
  if (args.activation == Activation::kNone) return "without an activation it is a product alone";
  if (args.with_sum && at::globalContext().deterministicAlgorithms()) {
    return "the graph's sum for the bias is not deterministic";
  }
  return reason_of(args.grad, args.weight, args.weight.size(1));
}

LinearParams linear_params(const Linear& args, Keep keep) {
  LinearParams params;
  const auto dtype = args.input.scalar_type();
  const int64_t columns = args.weight.size(0);
  params.input = desc_of(args.input);
  params.weight = desc_of(args.weight);
  params.out = dense_desc(dtype, args.input.size(0), columns);
  if (args.bias) params.bias = dense_desc(dtype, 1, columns);
  if (args.residual) params.residual = params.out;
  if (keep != Keep::kNothing) params.before = params.out;
  params.keeps_slope = keep == Keep::kSlope;
  params.activation = args.kind();
  return params;
}

HiddenGradientParams hidden_gradient_params(const HiddenGradient& args) {
  HiddenGradientParams params;
  const int64_t columns = args.weight.size(1);
  params.grad = desc_of(args.grad);
  params.weight = desc_of(args.weight);
  params.out = dense_desc(args.grad.scalar_type(), args.grad.size(0), columns);
  params.saved = params.out;
  if (args.with_sum) params.sum = dense_desc(at::kFloat, 1, columns);
  params.activation = args.activation;
  return params;
}

}  // namespace cudnn_ops
