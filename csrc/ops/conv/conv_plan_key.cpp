// The plans that a convolution needs, and why it runs otherwise, for those who ask without calling.

#include "ops/conv/conv_choice.h"
#include "ops/conv/conv_transpose.h"

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

// What computes a step of a transposed convolution: another step of its mirror.
KernelChoice choose_transposed_kernel(const Conv& args, ConvStep step) {
  if (has_no_mirror(args)) {
    return {ConvKernel::kProduct, "torch",
            "a kernel of torch runs: cuDNN's make no transposed convolution with an "
            "output_padding that is not less than the stride"};
  }
  ConvStep mirrored = step;
  if (step == ConvStep::kForward) mirrored = ConvStep::kInputGradient;
  if (step == ConvStep::kInputGradient) mirrored = ConvStep::kForward;
  return choose_kernel(mirror_of(args), mirrored);
}

// A step of a convolution, a ConvStep, of which the forward has the epilogue too.
struct ConvStepRequest {
  Conv conv;
  int64_t step = 0;
  CUDNN_OPS_FIELDS(conv, step)
};

// What runs where no plan does, empty where one does, and why it is that or a plan, as far as there
// is something to say.
std::tuple<std::string, std::string> other_engine(const ConvStepRequest& request) {
  const auto& [args, number] = request;
  check_conv(args);
  const auto step = static_cast<ConvStep>(number);
  const auto choice = args.geometry.is_transposed() ? choose_transposed_kernel(args, step)
                                                    : choose_kernel(args, step);
  return {std::string(choice.engine), std::string(choice.reason)};
}

// By a ConvStep and a KernelUse.
void use_depthwise(int64_t step, int64_t use) {
  set_depthwise_use(static_cast<ConvStep>(step), static_cast<KernelUse>(use));
}

void use_grouped(int64_t use) {
  set_grouped_use(static_cast<KernelUse>(use));
}

std::vector<int64_t> backward_plan_key(const at::Tensor& input, const at::Tensor& weight,
                                       c10::IntArrayRef geometry, bool is_of_weight) {
  const Conv args = bare_conv(input, weight, geometry);
  const bool is_transposed = args.geometry.is_transposed();
  if (is_transposed && !is_of_weight) {
    const auto params = conv_params(mirror_of(args), ConvFusion::kAll, /*with_before=*/false);
    return graph::PlanKey::of(params, 0).words().vec();
  }
  const auto params = conv_backward_params(is_transposed ? mirror_of(args) : args, is_of_weight);
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
  m.def(
      "_conv_other_engine(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int[] geometry, int activation, int step) -> (str, str)",
      kernel<other_engine>);
  m.def("_conv_use_depthwise(int step, int use) -> ()", use_depthwise);
  m.def("_conv_use_grouped(int use) -> ()", use_grouped);
  m.def(
      "_conv_backward_plan_key(Tensor input, Tensor weight, int[] geometry, bool is_of_weight) "
      "-> int[]",
      backward_plan_key);
}
