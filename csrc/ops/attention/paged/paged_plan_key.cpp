#include "ops/attention/paged/paged_plan_key.h"

#include "ops/attention/paged/paged_problem.h"

namespace cudnn_ops {

std::vector<int64_t> paged_plan_key(const PagedPlanRequest& request) {
  const Paged& args = request.args;
  check_paged(args);
  TORCH_CHECK_VALUE(
      args.query.numel() > 0 && args.key_cache.numel() > 0,
      "cudnn_ops.paged_attention: without queries or keys there is no plan; query is ",
      args.query.sizes(), " and key_cache ", args.key_cache.sizes());
  if (is_packed_batch(args)) return paged_plan_key({batch_of(args), request.with_lse});
  return graph::PlanKey::of(PagedProblem(args, request.with_lse).params, 0).words().vec();
}

}  // namespace cudnn_ops
