// Rows, normed or gated, rounded to 8 bits: schema and checks. The CUDA kernels are called in
// rows_fp8_cuda.cpp; those for CPUs and fake tensors are in cudnn_ops/ops/rows_fp8.py.

#include "ops/quantize/rows_fp8.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

void check_other(const RowsFp8& args, const char* op) {
  if (!args.other) return;
  const auto &input = args.input, &other = *args.other;
  const char* name = args.is_gated() ? "up" : "residual";
  const char* first = args.is_gated() ? "gate" : "input";
  TORCH_CHECK_TYPE(other.scalar_type() == input.scalar_type(), op, ": ", name, " must be of the ",
                   first, "'s dtype, ", input.scalar_type(), "; got ", other.scalar_type());
  TORCH_CHECK_VALUE(other.sym_sizes() == input.sym_sizes() && other.device() == input.device(), op,
                    ": ", name, " must be of the ", first, "'s shape, ", input.sym_sizes(), ", on ",
                    input.device(), "; got ", other.sym_sizes(), " on ", other.device());
}

void check_weight(const RowsFp8& args, const char* op) {
  if (!args.weight) return;
  const auto &input = args.input, &weight = *args.weight;
  TORCH_CHECK_TYPE(
      weight.scalar_type() == input.scalar_type() || weight.scalar_type() == at::kFloat, op,
      ": weight must be of the input's dtype, ", input.scalar_type(), ", or float32; got ",
      weight.scalar_type());
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.sym_size(0) == input.sym_size(-1) &&
                        weight.device() == input.device(),
                    op, ": weight must be [", input.sym_size(-1), "] on ", input.device(), "; got ",
                    weight.sym_sizes(), " on ", weight.device());
}

RowsFp8Results rows_fp8_autograd(c10::DispatchKeySet keys, const RowsFp8& args) {
  static const Operator<RowsFp8Results, RowsFp8> op("cudnn_ops::_rows_fp8");
  const std::string why =
      c10::str(args.name(), " has no derivative: rounding to 8 bits has none; detach the input");
  return without_derivative(op, keys, args, args.name(), why.c_str());
}

}  // namespace

void check_rows_fp8(const RowsFp8& args) {
  constexpr int64_t kMostKind = 4;
  const char* op = args.name();
  const auto& input = args.input;
  const char* name = args.is_gated() ? "gate" : "input";
  TORCH_CHECK_TYPE(input.defined() && is_computed_in(input.scalar_type()), op, ": ", name,
                   " must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   input.defined() ? c10::toString(input.scalar_type()) : "None");
  TORCH_CHECK_VALUE(input.dim() >= 1, op, ": ", name, " must have a dimension; got ",
                    input.sym_sizes());
  TORCH_CHECK_VALUE(args.kind >= 0 && args.kind <= kMostKind &&
                        (!args.is_gated() || args.other.has_value()) &&
                        (args.is_norm() || !args.weight),
                    op, ": kind must be 0 to 4, with up from 2 on, and with a weight only at 1");
  check_other(args, op);
  check_weight(args, op);
  TORCH_CHECK_VALUE(args.eps >= 0, op, ": eps must be at least 0, got ", args.eps);
  TORCH_CHECK_TYPE(is_fp8(args.dtype), op, ": dtype must be float8_e4m3fn or float8_e5m2; got ",
                   args.dtype);
  if (!args.scale) return;
  TORCH_CHECK_VALUE(args.scale->scalar_type() == at::kFloat &&
                        args.scale->sym_numel().sym_eq(1).expect_true(__FILE__, __LINE__) &&
                        args.scale->device() == input.device(),
                    op, ": scale must be one float32 number on ", input.device(), "; got ",
                    args.scale->scalar_type(), " ", args.scale->sym_sizes(), " on ",
                    args.scale->device());
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::string arguments =
      "(Tensor input, Tensor? other, Tensor? weight, Tensor? scale, int kind, float eps, "
      "bool zero_centered, ScalarType dtype) -> ";
  m.def(("_rows_fp8" + arguments + "(Tensor out, Tensor descale, Tensor amax, Tensor sum)").c_str(),
        tags);
  m.def(("_rows_fp8_check" + arguments + "()").c_str(), kernel<check_rows_fp8>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_rows_fp8", cudnn_ops::kernel<cudnn_ops::rows_fp8_autograd>);
}
