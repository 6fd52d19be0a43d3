// The plans that a convolution needs, and why it runs otherwise, for those who ask without calling.

#include "ops/conv/conv_choice.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

// A plan with that part of the epilogue.
struct ConvPlanRequest {
  Conv conv;
  int64_t fusion = 0;  // a ConvFusion
  bool with_before = false;
  CUDNN_OPS_FIELDS(conv, fusion, with_before)

  ConvParams params() const {
    check_conv(conv);
    return conv_params(conv, static_cast<ConvFusion>(fusion), with_before);
  }
};

std::vector<int64_t> plan_key(const ConvPlanRequest& request) {
  return graph::PlanKey::of(request.params(), 0).words().vec();
}

// Why that plan is not tried; empty where it is.
std::string bare_reason(const ConvPlanRequest& request) {
  return std::string(reason_for_bare(request.params()));
}

Conv bare_conv(const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef geometry) {
  const Conv args{input, weight, /*bias=*/{}, /*residual=*/{}, {ConvNumbers(geometry)}};
  check_conv(args);
  return args;
}

// What runs where no plan does, and why; both are empty where one does. `step` is a ConvStep.
std::tuple<std::string, std::string> other_engine(const at::Tensor& input, const at::Tensor& weight,
                                                  c10::IntArrayRef geometry, int64_t step) {
  const auto choice =
      choose_kernel(bare_conv(input, weight, geometry), static_cast<ConvStep>(step));
  return {std::string(choice.engine), std::string(choice.reason)};
}

std::vector<int64_t> backward_plan_key(const at::Tensor& input, const at::Tensor& weight,
                                       c10::IntArrayRef geometry, bool is_of_weight) {
  const auto params = conv_backward_params(bare_conv(input, weight, geometry), is_of_weight);
  return graph::PlanKey::of(params, 0).words().vec();
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  m.def(
      "_conv_plan_key(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int[] geometry, int activation, int fusion, bool with_before) -> int[]",
      kernel<plan_key>);
  m.def(
      "_conv_bare_reason(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int[] geometry, int activation, int fusion, bool with_before=False) -> str",
      kernel<bare_reason>);
  m.def("_conv_other_engine(Tensor input, Tensor weight, int[] geometry, int step) -> (str, str)",
        other_engine);
  m.def(
      "_conv_backward_plan_key(Tensor input, Tensor weight, int[] geometry, bool is_of_weight) "
      "-> int[]",
      backward_plan_key);
}
