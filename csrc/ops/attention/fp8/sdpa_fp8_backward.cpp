// The gradients of FP8 attention: the schema and the checks of its arguments. Kernels:
// sdpa_fp8_backward_cuda.cpp here, the CPU and fake ones in cudnn_ops/ops/sdpa_fp8_backward.py.

#include "ops/attention/fp8/sdpa_fp8_backward.h"

#include "ops/attention/check.h"
#include "ops/autograd_node.h"
#include "ops/context_parallel.h"

#include <torch/library.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.sdpa_fp8_backward: ";

void check_operand(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.defined(), kOp, name, " must be a tensor, got None");
  TORCH_CHECK_TYPE(
      is_fp8(tensor.scalar_type()), kOp, name,
      " must be float8_e4m3fn or float8_e5m2 (cudnn_ops.quantize_fp8 makes them); got ",
      tensor.scalar_type());
  check_fp8_operand(tensor, name, query, kOp);
}

// grad_out may have another format: its numbers are spread wider.
void check_format(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), kOp,
                   "query, key, value and out must be of one dtype; query is ", query.scalar_type(),
                   " and ", name, " ", tensor.scalar_type());
}

void check_sizes(const at::Tensor& tensor, const char* name, c10::SymIntArrayRef sizes,
                 const char* what) {
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size());
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    fits = holds(tensor.sym_size(static_cast<int64_t>(i)).sym_eq(sizes[i]));
  }
  TORCH_CHECK_VALUE(fits, kOp, name, " must be ", what, ", ", sizes, "; got ", tensor.sym_sizes());
}

void check_lse(const at::Tensor& lse, const at::Tensor& query) {
  TORCH_CHECK_TYPE(lse.defined(), kOp, "lse must be a tensor, got None");
  TORCH_CHECK_TYPE(lse.scalar_type() == at::kFloat, kOp, "lse must be float32, got ",
                   lse.scalar_type());
  TORCH_CHECK_VALUE(lse.device() == query.device(), kOp, "query is on ", query.device(),
                    " and lse on ", lse.device(), "; move them to one device");
  const std::array<c10::SymInt, 3> sizes{query.sym_size(0), query.sym_size(1), query.sym_size(2)};
  check_sizes(lse, "lse", sizes, "the log-sum-exp of the forward, [batch, heads, length]");
}

SdpaFp8Gradients sdpa_fp8_backward_autograd(c10::DispatchKeySet keys,
                                            const SdpaFp8Backward& given) {
  static const Operator<SdpaFp8Gradients, SdpaFp8Backward> op("cudnn_ops::_sdpa_fp8_backward");
  return without_derivative(op, keys, given, "cudnn_ops.sdpa_fp8_backward",
                            "cudnn_ops.sdpa_fp8_backward has no derivative: cuDNN has no second "
                            "derivative of attention");
}

}  // namespace

void check_sdpa_fp8_backward(const SdpaFp8Backward& given) {
  refuse_context_parallel(kOp);
  const Sdpa& args = given.args;
  const auto& query = args.query;
  TORCH_CHECK_TYPE(query.defined(), kOp, "query must be a tensor, got None");
  check_operand(query, "query", query);
  for (const auto& [tensor, name] : {std::pair{&args.key, "key"}, std::pair{&args.value, "value"},
                                     std::pair{&given.out, "out"}}) {
    check_operand(*tensor, name, query);
    check_format(*tensor, name, query);
  }
  check_operand(given.grad_out, "grad_out", query);
  check_fp8_sizes(args, kOp);
  const std::array<c10::SymInt, 4> sizes{query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                         args.value.sym_size(3)};
  constexpr const char* kWhat = "as the forward's output, [batch, heads, length, value head size]";
  check_sizes(given.out, "out", sizes, kWhat);
  check_sizes(given.grad_out, "grad_out", sizes, kWhat);
  check_lse(given.lse, query);
  check_fp8_scale(given.descale_query, "descale_q", query, kOp);
  check_fp8_scale(given.descale_key, "descale_k", query, kOp);
  check_fp8_scale(given.descale_value, "descale_v", query, kOp);
  check_fp8_scale(given.descale_out, "descale_o", query, kOp);
  check_fp8_scale(given.descale_grad_out, "descale_do", query, kOp);
  check_fp8_scale(given.scale_grad_scores, "scale_dp", query, kOp);
  const auto dtype = given.grad_dtype;
  TORCH_CHECK_TYPE(
      dtype == at::kHalf || dtype == at::kBFloat16 || (dtype == at::kFloat && !query.is_cuda()),
      kOp, "grad_dtype must be bfloat16 or float16 (float32 too on a CPU); got ", dtype);
  check_options(args, query, kOp);
  check_fp8_factor(args.scale, kOp);
  check_seq_lens(args.seq_lens_q, query, query.sym_size(2), "seq_lens_q", kOp);
  check_seq_lens(args.seq_lens_kv, query, args.key.sym_size(2), "seq_lens_kv", kOp);
}

std::string why_no_fp8_backward(int64_t sm_major) {
  constexpr int64_t kBlackwell = 10;
  if (sm_major >= kBlackwell) return {};
  return "cudnn_ops.sdpa_fp8_backward needs a Blackwell (compute capability 10.0): on Hopper "
         "cuDNN's "
         "FP8 backward gives gradients of 8 bits alone, for heads of 128 alone, and was measured "
         "to "
         "be slower than the one in 16 bits; older GPUs have none. "
         "cudnn_ops.scaled_dot_product_attention_fp8 attends in FP8 and has gradients in 16 bits";
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  // The order of SdpaFp8Backward::fields.
  const std::string arguments =
      "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
      "Tensor descale_q, Tensor descale_k, Tensor descale_v, Tensor descale_o, Tensor descale_do, "
      "Tensor scale_dp, ScalarType grad_dtype, bool is_causal=False, float? scale=None, "
      "int[2] window_size=[-1, -1], bool bottom_right=False, Tensor? seq_lens_q=None, "
      "Tensor? seq_lens_kv=None";
  m.def(("_sdpa_fp8_backward" + arguments +
         ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor amax_dp)")
            .c_str(),
        tags);
  m.def(("_sdpa_fp8_backward_check" + arguments + ") -> ()").c_str(),
        kernel<check_sdpa_fp8_backward>, tags);
  m.def(("_sdpa_fp8_backward_plan_key" + arguments +
         ", int sm_major=10) -> (int[] words, str refusal)")
            .c_str(),
        kernel<sdpa_fp8_backward_plan_key>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_sdpa_fp8_backward", cudnn_ops::kernel<cudnn_ops::sdpa_fp8_backward_autograd>);
}
