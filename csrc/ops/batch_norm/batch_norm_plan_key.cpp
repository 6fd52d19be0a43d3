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

// The key of the plan of a call; or who runs in its place, and why.
std::tuple<std::vector<int64_t>, std::string, std::string> batch_norm_plan(
    const BatchNormQuestion& question) {
  const auto& [call, backward] = question;
  const auto& [norm, training] = call;
  check_batch_norm(call);
  TORCH_CHECK_VALUE(norm.input.numel() > 0, kBatchNorm, ": nothing needs no plan");
  const bool has_more = norm.has_relu() || norm.residual.has_value();
  const auto reason = reason_without_plan(norm.input, training, has_more);
  if (!reason.empty()) {
    const bool is_ours = !training || has_pixel_kernels(norm.input);
    return {std::vector<int64_t>(), is_ours ? "cudnn_ops" : "torch", std::string(reason)};
  }
  const auto key = backward ? graph::PlanKey::of(batch_norm_backward_params(norm.input), 0)
                            : graph::PlanKey::of(batch_norm_params(norm), 0);
  return {key.words().vec(), {}, {}};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_batch_norm_plan_key(Tensor input, Tensor? running_mean, Tensor? running_var, "
      "Tensor? weight, Tensor? bias, Tensor? residual, float momentum, float eps, int activation, "
      "bool training, bool backward) -> (int[], str, str)",
      cudnn_ops::kernel<cudnn_ops::batch_norm_plan>);
}
