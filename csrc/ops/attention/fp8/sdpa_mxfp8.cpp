// MXFP8 attention: the schema and the checks of its arguments. Kernels: sdpa_mxfp8_cuda.cpp here,
// the CPU and fake ones in cudnn_ops/ops/mxfp8.py.

#include "ops/attention/fp8/sdpa_mxfp8.h"

#include "ops/attention/band.h"
#include "ops/attention/check.h"
#include "ops/attention/fp8/sdpa_fp8.h"
#include "ops/autograd_node.h"
#include "ops/context_parallel.h"

#include <torch/library.h>

#include <array>
#include <string>
#include <vector>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.sdpa_mxfp8: ";

c10::SymInt padded(const c10::SymInt& size, int64_t unit) {
  return (size + (unit - 1)) / unit * unit;
}

// `along`: the dimension whose elements share scales; `across`: the other one.
void check_scales(const at::Tensor& scales, const char* name, const at::Tensor& of, int64_t along,
                  int64_t across, const char* dim) {
  TORCH_CHECK_TYPE(scales.defined(), kOp, name, " must be a tensor, got None");
  const std::array<c10::SymInt, 4> sizes{
      of.sym_size(0), of.sym_size(1), padded(of.sym_size(across), 128),
      padded(padded(of.sym_size(along), MxScales::kBlock) / MxScales::kBlock, 4)};
  bool fits = scales.dim() == 4 && scales.scalar_type() == at::kFloat8_e8m0fnu &&
              scales.device() == of.device();
  for (int64_t i = 0; fits && i < 4; ++i) {
    fits = holds(scales.sym_size(i).sym_eq(sizes[static_cast<size_t>(i)]));
  }
  TORCH_CHECK_VALUE(fits, kOp, name,
                    " must be the scales of cudnn_ops.quantize_mxfp8(..., dim=", dim,
                    "): float8_e8m0fnu ", c10::SymIntArrayRef(sizes), " on ", of.device(), "; got ",
                    scales.scalar_type(), " ", scales.sym_sizes(), " on ", scales.device());
}

// Of larger values cuDNN's own order of the scales is another one, and its kernel of 256 does not
// compile (9.28).
void check_head_sizes(const Sdpa& args) {
  const c10::SymInt size = args.query.sym_size(3), of_value = args.value.sym_size(3);
  const bool is_small = TORCH_GUARD_OR_FALSE(size.sym_le(128)) || holds(size.sym_eq(192));
  TORCH_CHECK_NOT_IMPLEMENTED(is_small && holds(of_value.sym_le(128)), kOp,
                              "head sizes are multiples of 16 up to 128, and 192 of query and key "
                              "with values of up to 128; got ",
                              size, " and ", of_value);
}

// The host knows all lengths. cuDNN's forward is not asked what queries without a key are given.
void check_visible(const Sdpa& args) {
  const c10::SymInt length = args.query.sym_size(2), length_kv = args.key.sym_size(2);
  const c10::SymInt shift = args.bottom_right ? length_kv - length : c10::SymInt(0);
  const int64_t left = args.window_size[0];
  const int64_t right = args.is_causal ? 0 : args.window_size[1];
  const bool has_keys = right < 0 || holds((shift + right).sym_ge(0));
  const bool has_last = left < 0 || holds((length + shift - left).sym_le(length_kv));
  TORCH_CHECK_NOT_IMPLEMENTED(has_keys && has_last, kOp, "every query must see a key; of ", length,
                              " queries and ", length_kv, " keys, a mask hides all keys from some");
}

SdpaMxFp8Results sdpa_mxfp8_autograd(c10::DispatchKeySet keys, const SdpaMxFp8& given) {
  static const Operator<SdpaMxFp8Results, SdpaMxFp8> op("cudnn_ops::_sdpa_mxfp8");
  return without_derivative(op, keys, given, "cudnn_ops.sdpa_mxfp8",
                            "cudnn_ops.sdpa_mxfp8 has no derivative: rounding to 8 bits has none; "
                            "train with cudnn_ops.scaled_dot_product_attention on float16 or "
                            "bfloat16");
}

}  // namespace

void check_sdpa_mxfp8(const SdpaMxFp8& given) {
  refuse_context_parallel(kOp);
  const Sdpa& args = given.args;
  const auto& query = args.query;
  TORCH_CHECK_TYPE(query.defined(), kOp, "query must be a tensor, got None");
  check_rounded_operands(args, "cudnn_ops.quantize_mxfp8", kOp);
  check_fp8_sizes(args, kOp);
  check_head_sizes(args);
  check_scales(given.descale_query, "descale_q", query, 3, 2, "-1");
  check_scales(given.descale_key, "descale_k", args.key, 3, 2, "-1");
  check_scales(given.descale_value, "descale_v", args.value, 2, 3, "-2");
  const auto dtype = given.out_dtype;
  TORCH_CHECK_TYPE(
      dtype == at::kHalf || dtype == at::kBFloat16 || (dtype == at::kFloat && !query.is_cuda()),
      kOp, "out_dtype must be bfloat16 or float16 (float32 too on a CPU); got ", dtype);
  check_options(args, query, kOp);
  check_fp8_factor(args.scale, kOp);
  check_visible(args);
}

// Seen here with cuDNN 9.28.1, for a described B200: a segmentation fault for one query, and
// CUDNN_STATUS_INTERNAL_ERROR_COMPILATION_FAILED for 2 of head size 192. Up to 15 of those are
// refused as those of FP8 (known_bad.json).
std::string why_no_mxfp8(const Sdpa& args) {
  constexpr int64_t kLargeHead = 128, kFewQueries = 16;
  const int64_t length = args.query.size(2);
  if (length == 1 || (args.query.size(3) > kLargeHead && length < kFewQueries)) {
    return c10::str(
        "cudnn_ops.sdpa_mxfp8: cuDNN has no kernel for a single query, nor for less "
        "than 16 of head size 192; got ",
        args.query.sizes());
  }
  return {};
}

SdpaMxFp8Params sdpa_mxfp8_params(const Sdpa& args, const graph::TensorDesc& query,
                                  const graph::TensorDesc& key, const graph::TensorDesc& value,
                                  const graph::TensorDesc& out) {
  SdpaMxFp8Params params;
  params.query = query;
  params.key = key;
  params.value = value;
  params.out = out;
  params.mask = mask_of_options(args, Band::of(args), /*has_alibi=*/false, /*backward=*/false);
  return params;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  // The order of SdpaMxFp8::fields.
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, Tensor descale_q, Tensor descale_k, "
      "Tensor descale_v, ScalarType out_dtype, bool is_causal=False, float? scale=None, "
      "int[2] window_size=[-1, -1], bool bottom_right=False";
  m.def(("_sdpa_mxfp8" + arguments + ") -> (Tensor out, Tensor lse, Tensor amax_o)").c_str(), tags);
  m.def(("_sdpa_mxfp8_check" + arguments + ") -> ()").c_str(), kernel<check_sdpa_mxfp8>, tags);
  m.def(("_sdpa_mxfp8_plan_key" + arguments + ") -> (int[] words, str refusal)").c_str(),
        kernel<sdpa_mxfp8_plan_key>);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_sdpa_mxfp8", cudnn_ops::kernel<cudnn_ops::sdpa_mxfp8_autograd>);
}
