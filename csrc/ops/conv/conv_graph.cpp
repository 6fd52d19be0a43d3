// Convolutions with their epilogue, and their gradients, as cuDNN graphs.

#include "ops/conv/conv_params.h"

#include "graph/frontend.h"
#include "graph/plan_kind.h"
#include "ops/activation_graph.h"

#include <c10/util/accumulate.h>

namespace cudnn_ops::conv_graph {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// A plan expects the addresses in ascending uid order: conv_cuda.cpp gives them in this order.
enum Uid : int64_t { kInput = 1, kWeight, kBias, kResidual, kGrad, kBefore, kOut };

template <class Attributes>
Attributes attributes_of(const ConvSteps& steps, const char* name) {
  const auto used = [&](const std::array<int64_t, 3>& numbers) {
    return std::vector<int64_t>(numbers.begin(), numbers.begin() + steps.dims);
  };
  return Attributes()
      .set_name(name)
      .set_pre_padding(used(steps.before))
      .set_post_padding(used(steps.after))
      .set_stride(used(steps.stride))
      .set_dilation(used(steps.dilation));
}

template <class Params>
std::shared_ptr<graph::FrontendGraph> new_conv_graph(const Params& params,
                                                     const graph::Target& target) {
  auto graph = graph::new_graph(target, params.input.dtype);
  if (params.deterministic) graph->refuse(fe::NumericalNote_t::NONDETERMINISTIC);
  if (params.input.dtype == at::kFloat && !params.allow_tf32) {
    graph->refuse(fe::NumericalNote_t::TENSOR_CORE);
  }
  return graph;
}

Tensor convolve(graph::FrontendGraph& graph, const ConvParams& params) {
  const auto input = graph::input(graph, "input", kInput, params.input);
  const auto weight = graph::input(graph, "weight", kWeight, params.weight);
  if (!params.is_transposed) {
    return graph.conv_fprop(input, weight,
                            attributes_of<fe::graph::Conv_fprop_attributes>(params.steps, "conv"));
  }
  const auto out = graph.conv_dgrad(
      input, weight, attributes_of<fe::graph::Conv_dgrad_attributes>(params.steps, "conv_dgrad"));
  // Several sizes lead to one input: it does not follow which is meant.
  const auto rank = params.out.rank;
  out->set_dim({params.out.sizes.begin(), params.out.sizes.begin() + rank})
      .set_stride({params.out.strides.begin(), params.out.strides.begin() + rank});
  return out;
}

std::shared_ptr<graph::FrontendGraph> make_ordered(const ConvParams& params,
                                                   const graph::Target& target,
                                                   bool residual_first) {
  const auto graph = new_conv_graph(params, target);
  const auto add = [&](const Tensor& a, const Tensor& b, const char* name) {
    return graph->pointwise(
        a, b, fe::graph::Pointwise_attributes().set_name(name).set_mode(fe::PointwiseMode_t::ADD));
  };
  Tensor out = convolve(*graph, params);
  const auto add_bias = [&] {
    if (params.bias.rank == 0) return;
    const auto bias = graph::input(*graph, "bias", kBias, params.bias);
    out = add(out, bias, "add_bias");
  };
  if (!residual_first) add_bias();
  if (params.residual.rank > 0) {
    const auto residual = graph::input(*graph, "residual", kResidual, params.residual);
    out = add(out, residual, "add_residual");
  }
  if (residual_first) add_bias();
  if (params.before.rank > 0) graph::output(out, kBefore, params.before);
  if (params.activation != Activation::kNone) {
    out = graph->pointwise(out, activation_node(params.activation));
  }
  graph::output(out, kOut, params.out);
  return graph;
}

// With the residual first, and no activation or ReLU, cuDNN has precompiled kernels, which are
// faster for large tensors; with the bias first it compiles some, which are faster for small ones.
bool has_either_order(const ConvParams& params) {
  return !params.is_transposed && params.bias.rank > 0 && params.residual.rank > 0 &&
         params.before.rank == 0 &&
         (params.activation == Activation::kNone || params.activation == Activation::kRelu);
}

// Measured with the engines that the heuristics name first (H200): ten of 13 shapes that write less
// than this were faster with the bias first, six of seven others with the residual, up to 1.7
// times.
constexpr int64_t kLargeBytes = 16 << 20;

bool is_residual_first(const ConvParams& params) {
  const auto* sizes = params.out.sizes.data();
  const int64_t numbers = c10::multiply_integers(sizes, sizes + params.out.rank);
  return has_either_order(params) &&
         numbers * static_cast<int64_t>(c10::elementSize(params.out.dtype)) >= kLargeBytes;
}

std::shared_ptr<graph::FrontendGraph> make_forward(const ConvParams& params,
                                                   const graph::Target& target) {
  return make_ordered(params, target, is_residual_first(params));
}

std::shared_ptr<graph::FrontendGraph> make_other_forward(const ConvParams& params,
                                                         const graph::Target& target) {
  return has_either_order(params) ? make_ordered(params, target, !is_residual_first(params))
                                  : nullptr;
}

std::shared_ptr<graph::FrontendGraph> make_backward(const ConvBackwardParams& params,
                                                    const graph::Target& target) {
  const auto graph = new_conv_graph(params, target);
  const auto grad = graph::input(*graph, "grad", kGrad, params.grad);
  if (params.is_of_weight) {
    const auto out = graph->conv_wgrad(
        grad, graph::input(*graph, "input", kInput, params.input),
        attributes_of<fe::graph::Conv_wgrad_attributes>(params.steps, "conv_wgrad"));
    graph::output(out, kOut, params.weight);
  } else {
    const auto out = graph->conv_dgrad(
        grad, graph::input(*graph, "weight", kWeight, params.weight),
        attributes_of<fe::graph::Conv_dgrad_attributes>(params.steps, "conv_dgrad"));
    graph::output(out, kOut, params.input);
  }
  return graph;
}

// Engine 4 compiles a kernel in one of 56 tilings, of which the heuristics name five. With these in
// addition the fastest is 1.06 times as fast in the mean over 16 shapes with a residual or SiLU, at
// most 1.2 times, and for 13 of them within 3 % of the best of all 56 (H200, cuDNN 9.19).
std::vector<std::string> more_engines(const ConvParams& params, const graph::Target& target) {
  if (target.sm_version() != 90 || params.is_transposed) return {};
  return {"eng4_k24=4", "eng4_k24=9", "eng4_k24=54", "eng4_k24=55"};
}

const graph::RegisterPlanKind<ConvParams, make_forward, graph::heuristics_engine<ConvParams>,
                              make_other_forward, more_engines>
    forward_kind;
const graph::RegisterPlanKind<ConvBackwardParams, make_backward> backward_kind;

}  // namespace
}  // namespace cudnn_ops::conv_graph
