#include "ops/norm/norm_problem.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// One row behind the other, as cuDNN takes them and in no other way. It counts the columns by all
// strides, those of dimensions of size 1 too.
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

std::vector<int64_t> plan_key(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                              const OptionalTensor& weight, const OptionalTensor& bias,
                              bool is_layer, bool zero_centered, bool with_stats, bool backward) {
  const OptionalTensor none;
  const Norm args{input, none, normalized_shape, weight, bias, 0, is_layer, zero_centered};
  check_norm(args);
  TORCH_CHECK_VALUE(input.numel() > 0, name_of(args), ": nothing needs no plan");
  const auto key = backward ? graph::PlanKey::of(norm_backward_params(args), 0)
                            : graph::PlanKey::of(norm_params(args, with_stats), 0);
  return key.words().vec();
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

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_norm_plan_key(Tensor input, SymInt[] normalized_shape, *, Tensor? weight=None, "
      "Tensor? bias=None, bool is_layer=False, bool zero_centered=False, bool with_stats=False, "
      "bool backward=False) -> int[]",
      cudnn_ops::plan_key);
}
