#include "ops/attention/fp8/varlen_fp8_problem.h"

#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/packed/varlen_problem.h"

namespace cudnn_ops {

SdpaFp8Params varlen_fp8_params(const Varlen& args, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, at::ScalarType written) {
  const auto params = varlen_params(args, query, key, value, /*with_lse=*/false, 0);
  SdpaFp8Params of_fp8{params.query, params.key, params.value, params.out, params.mask, false};
  of_fp8.out.dtype = written;
  return of_fp8;
}

std::vector<int64_t> varlen_fp8_plan_key(const VarlenFp8PlanRequest& request) {
  const auto& given = request.args;
  const Varlen& args = given.args;
  check_varlen_fp8(given);
  TORCH_CHECK_VALUE(
      args.query.numel() > 0 && args.key.numel() > 0 && args.cu_seqlens_q.size(0) > 1,
      "cudnn_ops.varlen_attention_fp8: without queries, keys or sequences there is no plan; q is ",
      args.query.sizes(), ", k ", args.key.sizes(), " and cu_seqlens_q ",
      args.cu_seqlens_q.sizes());
  const auto params =
      varlen_fp8_params(args, readable(args.query), readable(args.key), readable(args.value),
                        written_dtype(given.out_dtype, request.sm_major));
  return graph::PlanKey::of(params, 0).words().vec();
}

}  // namespace cudnn_ops
