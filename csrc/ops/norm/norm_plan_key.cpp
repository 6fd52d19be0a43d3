// The plan that a norm needs, for those who ask without calling.

#include "ops/norm/norm_problem.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

std::vector<int64_t> plan_key(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                              const OptionalTensor& weight, const OptionalTensor& bias,
                              bool is_layer, bool zero_centered, bool with_stats, bool backward) {
  const Norm args{input,
                  /*residual=*/{}, at::SymDimVector(normalized_shape),
                  weight,          bias,
                  /*eps=*/0,       is_layer,
                  zero_centered};
  check_norm(args);
  TORCH_CHECK_VALUE(input.numel() > 0, name_of(args), ": nothing needs no plan");
  const auto key = backward ? graph::PlanKey::of(norm_backward_params(args), 0)
                            : graph::PlanKey::of(norm_params(args, with_stats), 0);
  return key.words().vec();
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_norm_plan_key(Tensor input, SymInt[] normalized_shape, *, Tensor? weight=None, "
      "Tensor? bias=None, bool is_layer=False, bool zero_centered=False, bool with_stats=False, "
      "bool backward=False) -> int[]",
      cudnn_ops::plan_key);
}
