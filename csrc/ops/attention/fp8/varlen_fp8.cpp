// Attention over packed sequences of 8 bits: the schema and the checks of its arguments. Kernels:
// varlen_fp8_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/varlen_fp8.py.

#include "ops/attention/fp8/varlen_fp8.h"

#include "ops/attention/check.h"
#include "ops/attention/fp8/sdpa_fp8.h"
#include "ops/autograd_node.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.varlen_attention_fp8: ";

void check_operand(const at::Tensor& tensor, const char* name, const char* op) {
  TORCH_CHECK_TYPE(is_fp8(tensor.scalar_type()), op, name,
                   " must be float8_e4m3fn or float8_e5m2 (cudnn_ops.quantize_fp8 makes them); "
                   "got ",
                   tensor.scalar_type());
  check_fp8_head_size(tensor, name, op);
}

VarlenFp8Results varlen_fp8_autograd(c10::DispatchKeySet keys, const VarlenFp8& given) {
  static const Operator<VarlenFp8Results, VarlenFp8> op("cudnn_ops::_varlen_fp8");
  return without_derivative(
      op, keys, given, "cudnn_ops.varlen_attention_fp8",
      "cudnn_ops.varlen_attention_fp8 has no derivative: rounding to 8 bits has none; train with "
      "cudnn_ops.varlen_attention on float16 or bfloat16");
}

}  // namespace

void check_varlen_fp8(const VarlenFp8& given) {
  const auto& query = given.args.query;
  TORCH_CHECK_TYPE(query.defined() && given.args.key.defined() && given.args.value.defined(), kOp,
                   "q, k and v must be tensors, got None");
  check_packed_call(given.args, kOp, check_operand);
  check_fp8_scale(given.descale_query, "descale_q", query, kOp);
  check_fp8_scale(given.descale_key, "descale_k", query, kOp);
  check_fp8_scale(given.descale_value, "descale_v", query, kOp);
  if (given.scale_out) check_fp8_scale(*given.scale_out, "scale_o", query, kOp);
  check_fp8_out_dtype(given.out_dtype, query, kOp);
  check_fp8_factor(given.args.scale, kOp);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  // The order of VarlenFp8::fields.
  const std::string arguments =
      "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor descale_q, Tensor descale_k, "
      "Tensor descale_v, ScalarType out_dtype, Tensor? scale_o=None, float? softmax_scale=None, "
      "bool causal=False, int[2] window_size=[-1, -1], Tensor? seqused_q=None, "
      "Tensor? seqused_k=None, bool bottom_right=True";
  m.def(("_varlen_fp8" + arguments + ") -> (Tensor out, Tensor amax_s, Tensor amax_o)").c_str(),
        tags);
  m.def(("_varlen_fp8_check" + arguments + ") -> ()").c_str(), kernel<check_varlen_fp8>, tags);
  m.def(("_varlen_fp8_plan_key" + arguments + ", int sm_major=9) -> int[]").c_str(),
        kernel<varlen_fp8_plan_key>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_varlen_fp8", cudnn_ops::kernel<cudnn_ops::varlen_fp8_autograd>);
}
