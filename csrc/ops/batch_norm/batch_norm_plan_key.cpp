// The plans that a batch norm needs, and why it runs otherwise, for those who ask without calling.

#include "ops/batch_norm/batch_norm_problem.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

struct BatchNormQuestion {
  BatchNormCall call;
  bool backward = false;
  CUDNN_OPS_FIELDS(call, backward)
};

// The key of the plan of a call, or why there is none. With ReLU a backward that takes no mask has
// the plan of one without.
std::tuple<std::vector<int64_t>, std::string> batch_norm_plan(const BatchNormQuestion& question) {
  const auto& [call, backward] = question;
  const auto& [norm, training] = call;
  check_batch_norm(call);
  TORCH_CHECK_VALUE(norm.input.numel() > 0, kBatchNorm, ": nothing needs no plan");
  const auto reason =
      backward ? reason_without_plan(norm.input, training) : reason_without_plan(norm, training);
  if (!reason.empty()) return {std::vector<int64_t>(), std::string(reason)};
  if (!backward) return {graph::PlanKey::of(batch_norm_params(norm), 0).words().vec(), {}};
  const bool has_mask = norm.has_relu() && takes_mask(norm.input);
  const auto params =
      batch_norm_backward_params(norm.input, has_mask, has_mask && norm.residual.has_value());
  return {graph::PlanKey::of(params, 0).words().vec(), {}};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_batch_norm_plan_key(Tensor input, Tensor? running_mean, Tensor? running_var, "
      "Tensor? weight, Tensor? bias, Tensor? residual, float momentum, float eps, int activation, "
      "bool training, bool backward) -> (int[], str)",
      cudnn_ops::kernel<cudnn_ops::batch_norm_plan>);
}
