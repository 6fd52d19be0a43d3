// Rounding to 8 bits and back: schemas, checks and derivatives. The CUDA kernels are called in
// quantize_cuda.cpp; those for CPUs and fake tensors are in cudnn_ops/ops/quantize.py.

#include "ops/quantize/quantize.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kQuantize = "cudnn_ops.quantize_fp8";
constexpr const char* kDequantize = "cudnn_ops.dequantize_fp8";
// A row of blocks each.
constexpr int64_t kMaxGroups = 65535;

void check_groups(const at::Tensor& input, const OptionalTensor& scale, const char* name,
                  const std::optional<int64_t>& dim, const char* op) {
  TORCH_CHECK_VALUE(!dim || (*dim >= 0 && *dim < input.dim()), op,
                    ": dim must be a dimension of the input, ", input.sym_sizes(), "; got ",
                    dim.value_or(0));
  const c10::SymInt groups = dim ? input.sym_size(*dim) : c10::SymInt(1);
  TORCH_CHECK_VALUE(groups.sym_le(kMaxGroups).expect_true(__FILE__, __LINE__), op, ": at most ",
                    kMaxGroups, " numbers can have a scale each; the input has ", groups,
                    " of them along dim ", dim.value_or(0));
  if (!scale) return;
  TORCH_CHECK_VALUE(scale->scalar_type() == at::kFloat && scale->device() == input.device() &&
                        scale->sym_numel().sym_eq(groups).expect_true(__FILE__, __LINE__),
                    op, ": ", name, " must be float32 [", groups, "] on ", input.device(), "; got ",
                    scale->scalar_type(), " ", scale->sym_sizes(), " on ", scale->device());
}

Quantized quantize_autograd(c10::DispatchKeySet keys, const Quantize& args) {
  return without_derivative(quantize_op(), keys, args, kQuantize,
                            "cudnn_ops.quantize_fp8 has no derivative: rounding has none; detach "
                            "the input");
}

at::Tensor dequantize_autograd(c10::DispatchKeySet keys, const Dequantize& args) {
  return without_derivative(dequantize_op(), keys, args, kDequantize,
                            "cudnn_ops.dequantize_fp8 has no derivative; detach the input");
}

}  // namespace

const Operator<Quantized, Quantize>& quantize_op() {
  static const Operator<Quantized, Quantize> op("cudnn_ops::_quantize_fp8");
  return op;
}

const Operator<at::Tensor, Dequantize>& dequantize_op() {
  static const Operator<at::Tensor, Dequantize> op("cudnn_ops::_dequantize_fp8");
  return op;
}

void check_quantize(const Quantize& args) {
  TORCH_CHECK_TYPE(is_computed_in(args.input.scalar_type()), kQuantize,
                   ": input must be float16, bfloat16 or float32 (float64 too on a CPU); got ",
                   args.input.scalar_type());
  TORCH_CHECK_TYPE(is_fp8(args.dtype), kQuantize,
                   ": dtype must be float8_e4m3fn or float8_e5m2; got ", args.dtype);
  check_groups(args.input, args.scale, "scale", args.dim, kQuantize);
}

void check_dequantize(const Dequantize& args) {
  TORCH_CHECK_TYPE(is_fp8(args.input.scalar_type()), kDequantize,
                   ": input must be float8_e4m3fn or float8_e5m2; got ", args.input.scalar_type());
  TORCH_CHECK_TYPE(is_computed_in(args.dtype) && args.dtype != at::kDouble, kDequantize,
                   ": dtype must be float16, bfloat16 or float32; got ", args.dtype);
  check_groups(args.input, args.descale, "descale", args.dim, kDequantize);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  // Results are laid out as the input is.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const std::string arguments =
      "(Tensor input, Tensor? scale, int? dim, ScalarType dtype, bool power_of_two=False) -> ";
  m.def(("_quantize_fp8" + arguments + "(Tensor out, Tensor descale, Tensor amax)").c_str(), tags);
  m.def(("_quantize_fp8_check" + arguments + "()").c_str(), kernel<check_quantize>, tags);
  const std::string back = "(Tensor input, Tensor descale, int? dim, ScalarType dtype) -> ";
  m.def(("_dequantize_fp8" + back + "Tensor").c_str(), tags);
  m.def(("_dequantize_fp8_check" + back + "()").c_str(), kernel<check_dequantize>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_quantize_fp8", cudnn_ops::kernel<cudnn_ops::quantize_autograd>);
  m.impl("_dequantize_fp8", cudnn_ops::kernel<cudnn_ops::dequantize_autograd>);
}
