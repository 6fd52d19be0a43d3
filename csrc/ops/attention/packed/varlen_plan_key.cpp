#include "ops/attention/packed/varlen_plan_key.h"

#include "ops/attention/packed/varlen_problem.h"

namespace cudnn_ops {

std::vector<int64_t> varlen_plan_key(const VarlenPlanRequest& request) {
  const Varlen& args = request.args;
  check_varlen(args);
  const auto &q = args.query, &k = args.key, &v = args.value;
  TORCH_CHECK_VALUE(q.numel() > 0 && k.numel() > 0 && args.cu_seqlens_q.size(0) > 1,
                    "cudnn_ops.varlen_attention: without queries, keys or sequences there is no "
                    "plan; q is ",
                    q.sizes(), ", k ", k.sizes(), " and cu_seqlens_q ", args.cu_seqlens_q.sizes());
  const at::Tensor query = readable(q), key = readable(k), value = readable(v);
  const bool has_lse = request.with_lse || request.backward;
  const int64_t stride = has_lse ? lse_stride(args, request.sm_major) : 0;
  if (!request.backward) {
    const auto params = varlen_params(args, query, key, value, request.with_lse, stride);
    return graph::PlanKey::of(params, 0).words().vec();
  }
  const at::Tensor out = q.new_empty({q.size(0), q.size(1), v.size(2)});
  const auto params = varlen_backward_params(args, query, key, value, out, out, stride);
  return graph::PlanKey::of(params, 0).words().vec();
}

}  // namespace cudnn_ops
