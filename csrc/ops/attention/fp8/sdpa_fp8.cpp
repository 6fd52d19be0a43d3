// FP8 attention: the schema and the checks of its arguments. Kernels: sdpa_fp8_cuda.cpp here, the
// CPU and fake ones in cudnn_ops/ops/sdpa_fp8.py.

#include "ops/attention/fp8/sdpa_fp8.h"

#include "ops/attention/check.h"
#include "ops/attention/fp8/sdpa_fp8_plan_key.h"
#include "ops/autograd_node.h"
#include "ops/context_parallel.h"

#include <torch/library.h>

#include <limits>
#include <string>
#include <vector>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.sdpa_fp8: ";

void check_descale_of_value(const SdpaFp8& given) {
  const auto &descale = given.descale_value, &value = given.args.value;
  TORCH_CHECK_TYPE(descale.defined(), kOp, "descale_v must be a tensor, got None");
  const bool is_one = descale.sym_numel() == 1;
  TORCH_CHECK_VALUE(descale.scalar_type() == at::kFloat && descale.device() == value.device() &&
                        (is_one || holds(descale.sym_numel().sym_eq(value.sym_size(1)))),
                    kOp, "descale_v must be one float32 number, or ", value.sym_size(1),
                    ", one for each head of value, on ", value.device(), "; got ",
                    descale.scalar_type(), " ", descale.sym_sizes(), " on ", descale.device());
  TORCH_CHECK_VALUE(is_one || !given.scale_out, kOp,
                    "scale_o is of an output under one descale_v; with one for each head the "
                    "output is rounded under those");
}

SdpaFp8Results sdpa_fp8_autograd(c10::DispatchKeySet keys, const SdpaFp8& given) {
  return without_derivative(
      sdpa_fp8_op(), keys, given, "cudnn_ops.sdpa_fp8",
      "cudnn_ops.sdpa_fp8 has no derivative: rounding to 8 bits has none; train with "
      "cudnn_ops.scaled_dot_product_attention_fp8 or cudnn_ops.scaled_dot_product_attention on "
      "float16 or bfloat16");
}

}  // namespace

const Operator<SdpaFp8Results, SdpaFp8>& sdpa_fp8_op() {
  static const Operator<SdpaFp8Results, SdpaFp8> op("cudnn_ops::_sdpa_fp8");
  return op;
}

void check_fp8_operand(const at::Tensor& tensor, const char* name, const at::Tensor& query,
                       const char* op) {
  TORCH_CHECK_VALUE(tensor.device() == query.device(), op, "query is on ", query.device(), " and ",
                    name, " on ", tensor.device(), "; move them to one device");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.dim() == 4, op, name,
                    " must be a dense tensor [batch, heads, length, head size]; got ",
                    tensor.layout(), " of shape ", tensor.sym_sizes());
  check_fp8_head_size(tensor, name, op);
}

void check_rounded_operands(const Sdpa& args, const char* quantizer, const char* op) {
  const auto& query = args.query;
  const auto check = [&](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK_TYPE(tensor.defined(), op, name, " must be a tensor, got None");
    TORCH_CHECK_TYPE(
        is_fp8(tensor.scalar_type()) && tensor.scalar_type() == query.scalar_type(), op,
        "query, key and value must be of one dtype, float8_e4m3fn or float8_e5m2 (", quantizer,
        " makes them); ", name, " is ", tensor.scalar_type(),
        tensor.scalar_type() == query.scalar_type() ? std::string()
                                                    : c10::str(" and query ", query.scalar_type()));
    check_fp8_operand(tensor, name, query, op);
  };
  check(query, "query");
  check(args.key, "key");
  check(args.value, "value");
}

void check_fp8_sizes(const Sdpa& args, const char* op) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  TORCH_CHECK_VALUE(holds(query.sym_size(3).sym_eq(key.sym_size(3))), op, "query has head size ",
                    query.sym_size(3), " and key ", key.sym_size(3),
                    "; they must be equal (the value's may differ)");
  TORCH_CHECK_VALUE(holds(key.sym_size(0).sym_eq(query.sym_size(0))) &&
                        holds(value.sym_size(0).sym_eq(query.sym_size(0))) &&
                        holds(value.sym_size(1).sym_eq(key.sym_size(1))) &&
                        holds(value.sym_size(2).sym_eq(key.sym_size(2))),
                    op,
                    "key and value must have the query's batch size, and the same heads and "
                    "length; got ",
                    query.sym_sizes(), ", ", key.sym_sizes(), " and ", value.sym_sizes());
  TORCH_CHECK_VALUE(is_multiple(query.sym_size(1), key.sym_size(1)), op, "query has ",
                    query.sym_size(1), " heads and key ", key.sym_size(1),
                    "; the first must be a multiple of the second");
}

void check_fp8_head_size(const at::Tensor& tensor, const char* name, const char* op) {
  const auto size = tensor.sym_size(-1);
  TORCH_CHECK_VALUE(holds((size % 16).sym_eq(0)) && holds(size.sym_ge(16)), op, "the head size of ",
                    name, " is ", size,
                    "; cuDNN supports multiples of 16 from 16 on: pad the last dimension with "
                    "zeros, and pass the scale");
}

void check_fp8_scale(const at::Tensor& scale, const char* name, const at::Tensor& query,
                     const char* op) {
  TORCH_CHECK_TYPE(scale.defined(), op, name, " must be a tensor, got None");
  TORCH_CHECK_VALUE(scale.scalar_type() == at::kFloat && holds(scale.sym_numel().sym_eq(1)) &&
                        scale.device() == query.device(),
                    op, name, " must be one float32 number on ", query.device(), "; got ",
                    scale.scalar_type(), " ", scale.sym_sizes(), " on ", scale.device());
}

void check_fp8_out_dtype(at::ScalarType dtype, const at::Tensor& query, const char* op) {
  TORCH_CHECK_TYPE(is_fp8(dtype) || dtype == at::kHalf || dtype == at::kBFloat16 ||
                       (dtype == at::kFloat && !query.is_cuda()),
                   op,
                   "out_dtype must be bfloat16, float16, float8_e4m3fn or float8_e5m2 (float32 too "
                   "on a CPU); got ",
                   dtype);
}

void check_fp8_factor(const std::optional<double>& scale, const char* op) {
  // cuDNN subtracts the largest score before it scales them.
  TORCH_CHECK_VALUE(!scale || *scale >= std::numeric_limits<float>::min(), op,
                    "scale must be a normal, positive float32, got ", scale.value_or(0.0));
}

void check_sdpa_fp8(const SdpaFp8& given) {
  refuse_context_parallel(kOp);
  const Sdpa& args = given.args;
  const auto& query = args.query;
  TORCH_CHECK_TYPE(query.defined(), kOp, "query must be a tensor, got None");
  check_rounded_operands(args, "cudnn_ops.quantize_fp8", kOp);
  check_fp8_sizes(args, kOp);
  check_fp8_scale(given.descale_query, "descale_q", query, kOp);
  check_fp8_scale(given.descale_key, "descale_k", query, kOp);
  check_descale_of_value(given);
  if (given.scale_out) check_fp8_scale(*given.scale_out, "scale_o", query, kOp);
  check_fp8_out_dtype(given.out_dtype, query, kOp);
  check_options(args, query, kOp);
  check_fp8_factor(args.scale, kOp);
  check_seq_lens(args.seq_lens_q, query, query.sym_size(2), "seq_lens_q", kOp);
  check_seq_lens(args.seq_lens_kv, query, args.key.sym_size(2), "seq_lens_kv", kOp);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  // Results are laid out as their inputs are, so a compiler must hand over the very strides
  // that it traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  // The order of SdpaFp8::fields.
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, Tensor descale_q, Tensor descale_k, "
      "Tensor descale_v, ScalarType out_dtype, Tensor? scale_o=None, bool is_causal=False, "
      "float? scale=None, int[2] window_size=[-1, -1], bool bottom_right=False, "
      "Tensor? seq_lens_q=None, Tensor? seq_lens_kv=None, bool with_lse=False";
  m.def(("_sdpa_fp8" + arguments + ") -> (Tensor out, Tensor lse, Tensor amax_s, Tensor amax_o)")
            .c_str(),
        tags);
  m.def(("_sdpa_fp8_check" + arguments + ") -> ()").c_str(), kernel<check_sdpa_fp8>, tags);
  m.def(("_sdpa_fp8_plan_key" + arguments + ", int sm_major=9) -> (int[] words, str refusal)")
            .c_str(),
        kernel<sdpa_fp8_plan_key>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_sdpa_fp8", cudnn_ops::kernel<cudnn_ops::sdpa_fp8_autograd>);
}
