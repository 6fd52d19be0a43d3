// Attention on tensors of 16 bits, computed in FP8, with a derivative in 16 bits: operators of this
// library one behind the other. See cudnn_ops/ops/sdpa_fp8.py for the formulas, and for why the
// derivative is the one at the rounded tensors.

#include "ops/attention/attention_autograd.h"
#include "ops/attention/check.h"
#include "ops/attention/fp8/sdpa_fp8.h"
#include "ops/context_parallel.h"
#include "ops/quantize_fp8.h"

#include <torch/library.h>

#include <string>
#include <vector>

namespace cudnn_ops {
namespace {

constexpr char kNode[] = "SdpaInFp8Backward";
constexpr const char* kOp = "cudnn_ops.scaled_dot_product_attention_fp8: ";

struct SdpaInFp8 : Sdpa {
  CUDNN_OPS_FIELDS(query, key, value, is_causal, scale, window_size, bottom_right, seq_lens_q,
                   seq_lens_kv, deterministic)
};

// `args` has the rounded tensors: half the memory of those that were given.
struct Saved {
  Sdpa args;
  at::Tensor descale_query, descale_key, descale_value, out, lse;
  CUDNN_OPS_FIELDS(args, descale_query, descale_key, descale_value, out, lse)
};

void check_input(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  TORCH_CHECK_TYPE(tensor.defined(), kOp, name, " must be a tensor, got None");
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_TYPE(dtype == query.scalar_type() && (dtype == at::kHalf || dtype == at::kBFloat16 ||
                                                    (dtype == at::kFloat && tensor.is_cpu())),
                   kOp,
                   "query, key and value must be of one dtype, float16 or bfloat16 (float32 too on "
                   "a CPU); ",
                   name, " is ", dtype, " on ", tensor.device(),
                   is_fp8(dtype) ? "; cudnn_ops.sdpa_fp8 takes 8 bits, and their scales" : "");
  check_fp8_operand(tensor, name, query, kOp);
}

void check_sdpa_in_fp8(const SdpaInFp8& args) {
  refuse_context_parallel(kOp);
  const auto& query = args.query;
  TORCH_CHECK_TYPE(query.defined(), kOp, "query must be a tensor, got None");
  check_input(query, "query", query);
  check_input(args.key, "key", query);
  check_input(args.value, "value", query);
  check_fp8_sizes(args, kOp);
  check_options(args, query, kOp);
  check_fp8_factor(args.scale, kOp);
  check_seq_lens(args.seq_lens_q, query, query.sym_size(2), "seq_lens_q", kOp);
  check_seq_lens(args.seq_lens_kv, query, args.key.sym_size(2), "seq_lens_kv", kOp);
}

const Operator<at::Tensor, SdpaInFp8>& sdpa_in_fp8_op() {
  static const Operator<at::Tensor, SdpaInFp8> op("cudnn_ops::sdpa_in_fp8");
  return op;
}

// At the tensors that the forward attended with, whose log-sum-exp and output it saved. Their
// scales are powers of two, so widening them is exact, and the scores are the forward's again.
variable_list gradients(const variable_list& grads, const Wanted<3>& wanted, const Saved& saved) {
  SdpaBackward given{saved.args, grads[0], saved.out, saved.lse};
  const auto widen = [&](at::Tensor& tensor, const at::Tensor& descale) {
    tensor = with_unit_last_stride(
        dequantize_op().call({tensor, descale, std::nullopt, saved.out.scalar_type()}));
  };
  widen(given.args.query, saved.descale_query);
  widen(given.args.key, saved.descale_key);
  widen(given.args.value, saved.descale_value);
  const auto [query, key, value, mask, sinks] = sdpa_backward_op().call(given);
  return only_wanted(wanted, std::tie(query, key, value));
}

at::Tensor sdpa_in_fp8(const SdpaInFp8& args) {
  check_sdpa_in_fp8(args);
  refuse_forward_mode("cudnn_ops.scaled_dot_product_attention_fp8", args);
  const bool needs_gradient =
      torch::autograd::compute_requires_grad(args.query, args.key, args.value);
  SdpaFp8 given;
  given.args = args;
  at::Tensor out, lse;
  {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto round = [](at::Tensor& tensor, at::Tensor& descale) {
      std::tie(tensor, descale, std::ignore) = quantize_op().call(
          {tensor, std::nullopt, std::nullopt, at::kFloat8_e4m3fn, /*power_of_two=*/true});
    };
    round(given.args.query, given.descale_query);
    round(given.args.key, given.descale_key);
    round(given.args.value, given.descale_value);
    given.out_dtype = args.query.scalar_type();
    given.with_lse = needs_gradient;
    std::tie(out, lse, std::ignore, std::ignore) = sdpa_fp8_op().call(given);
  }
  if (needs_gradient) {
    set_derivative<BackwardNode<kNode, gradients>>(
        torch::autograd::collect_next_edges(args.query, args.key, args.value), {out},
        Saved{given.args, given.descale_query, given.descale_key, given.descale_value, out, lse});
  }
  return out;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  // The order of SdpaInFp8's fields.
  m.def(
      "sdpa_in_fp8(Tensor query, Tensor key, Tensor value, *, bool is_causal=False, "
      "float? scale=None, int[2] window_size=[-1, -1], bool bottom_right=False, "
      "Tensor? seq_lens_q=None, Tensor? seq_lens_kv=None, bool? deterministic=None) -> Tensor",
      kernel<sdpa_in_fp8>,
      std::vector<at::Tag>{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides});
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  using namespace cudnn_ops;
  m.impl("sdpa_in_fp8", kernel<attention_autocast<at::kCUDA, sdpa_in_fp8_op, SdpaInFp8>>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  using namespace cudnn_ops;
  m.impl("sdpa_in_fp8", kernel<attention_autocast<at::kCPU, sdpa_in_fp8_op, SdpaInFp8>>);
}
