// The plans that a convolution needs, and why it runs otherwise, for those who ask without calling.

#include "ops/conv/conv_choice.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

// A part of the epilogue, a ConvFusion, in one graph with the convolution.
struct FusedConv {
  Conv conv;
  int64_t fusion = 0;

  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(Conv::fields(self.conv), std::tie(self.fusion));
  }
  ConvParams params(bool with_before) const {
    check_conv(conv);
    return conv_params(conv, static_cast<ConvFusion>(fusion), with_before);
  }
};

struct FusedForward {
  FusedConv fused;
  bool with_before = false;

  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(FusedConv::fields(self.fused), std::tie(self.with_before));
  }
};

std::vector<int64_t> plan_key(const FusedForward& args) {
  return graph::PlanKey::of(args.fused.params(args.with_before), 0).words().vec();
}

// Why a plan with that part of the epilogue is not tried; empty where it is.
std::string bare_reason(const FusedConv& args) {
  return std::string(reason_for_bare(args.params(/*with_before=*/false)));
}

Conv bare_conv(const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef geometry) {
  Conv args{input, weight, /*bias=*/{}, /*residual=*/{}, {}};
  args.geometry.numbers = geometry;
  check_conv(args);
  return args;
}

// Why torch's kernel runs in place of a plan; empty where a plan does. `step` is a ConvStep.
std::string torch_reason(const at::Tensor& input, const at::Tensor& weight,
                         c10::IntArrayRef geometry, int64_t step) {
  return std::string(
      reason_for_torch(bare_conv(input, weight, geometry), static_cast<ConvStep>(step)));
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
      "int[] geometry, int activation, int fusion) -> str",
      kernel<bare_reason>);
  m.def("_conv_torch_reason(Tensor input, Tensor weight, int[] geometry, int step) -> str",
        torch_reason);
  m.def(
      "_conv_backward_plan_key(Tensor input, Tensor weight, int[] geometry, bool is_of_weight) "
      "-> int[]",
      backward_plan_key);
}
