#include "ops/norm/norm_problem.h"

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// cuDNN supports rows that lie one after the other, and no others. It infers the number of columns
// from all strides, also those of dimensions of size 1.
TensorDesc dense_desc(c10::ScalarType dtype, int64_t rows, int64_t size) {
  TensorDesc desc(dtype, {rows, size, 1, 1}, {size, 1, 1, 1});
  desc.strides = {size, 1, 1, 1};
  return desc;
}

TensorDesc rows_desc(const Norm& args) {
  const int64_t size = row_size(args.normalized_shape);
  return dense_desc(args.input.scalar_type(), args.input.numel() / size, size);
}

TensorDesc parameter_desc(const Norm& args, const OptionalTensor& parameter) {
  const auto dtype = parameter ? parameter->scalar_type() : args.input.scalar_type();
  return dense_desc(dtype, 1, row_size(args.normalized_shape));
}

}  // namespace

int64_t row_size(c10::SymIntArrayRef normalized_shape) {
  int64_t size = 1;
  for (const auto& dim : normalized_shape) size *= dim.expect_int();
  return size;
}

bool needs_weight(const Norm& args, bool backward) {
  return !args.weight && (backward || args.bias || args.zero_centered);
}

NormParams norm_params(const Norm& args, bool with_stats) {
  NormParams params;
  params.input = rows_desc(args);
  if (args.weight || needs_weight(args, /*backward=*/false)) {
    params.weight = parameter_desc(args, args.weight);
  }
  if (args.bias) params.bias = parameter_desc(args, args.bias);
  params.is_layer = args.is_layer;
  params.zero_centered = args.zero_centered;
  params.with_stats = with_stats;
  return params;
}

NormBackwardParams norm_backward_params(const Norm& args) {
  return {rows_desc(args), parameter_desc(args, args.weight), args.is_layer, args.zero_centered};
}

}  // namespace cudnn_ops
