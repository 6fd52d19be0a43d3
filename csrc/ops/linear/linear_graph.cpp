// Linear layers with their epilogue, and gradients of hidden layers, as cuDNN graphs.

#include "ops/linear/linear_params.h"

#include "graph/frontend.h"
#include "graph/plan_kind.h"
#include "ops/activation_graph.h"
#include "ops/activation_slope_graph.h"
#include "ops/linear/linear_choice.h"

namespace cudnn_ops::linear_graph {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// A plan expects the addresses in ascending uid order: linear_plans_cuda.cpp gives them in this
// order.
enum Uid : int64_t { kLeft = 1, kWeight, kBias, kResidual, kSaved, kBefore, kOut, kSum };

// As the right factor of a product, [1, inputs, outputs]: turned around where it lies, if need be.
graph::TensorDesc turned(graph::TensorDesc weight) {
  std::swap(weight.sizes[1], weight.sizes[2]);
  std::swap(weight.strides[1], weight.strides[2]);
  return weight;
}

Tensor product(graph::FrontendGraph& graph, const graph::TensorDesc& left,
               const graph::TensorDesc& right) {
  return graph.matmul(graph::input(graph, "left", kLeft, left),
                      graph::input(graph, "weight", kWeight, right),
                      fe::graph::Matmul_attributes().set_name("product"));
}

std::shared_ptr<graph::FrontendGraph> make_forward(const LinearParams& params,
                                                   const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.input.dtype);
  const auto add = [&](const Tensor& a, const Tensor& b, const char* name) {
    return graph->pointwise(
        a, b, fe::graph::Pointwise_attributes().set_name(name).set_mode(fe::PointwiseMode_t::ADD));
  };
  Tensor out = product(*graph, params.input, turned(params.weight));
  if (params.bias.rank > 0) {
    out = add(out, graph::input(*graph, "bias", kBias, params.bias), "add_bias");
  }
  if (params.keeps_slope) {
    const auto [value, slope] = value_and_slope(*graph, out, params.activation);
    graph::output(slope, kBefore, params.before);
    out = value;
  } else {
    if (params.before.rank > 0) graph::output(out, kBefore, params.before);
    if (params.activation == Activation::kGelu) {
      out = exact_gelu(*graph, out);
    } else if (params.activation != Activation::kNone) {
      out = graph->pointwise(out, activation_node(params.activation));
    }
  }
  if (params.residual.rank > 0) {
    out = add(out, graph::input(*graph, "residual", kResidual, params.residual), "add_residual");
  }
  graph::output(out, kOut, params.out);
  return graph;
}

std::shared_ptr<graph::FrontendGraph> make_hidden_gradient(const HiddenGradientParams& params,
                                                           const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.grad.dtype);
  const Tensor of_result = product(*graph, params.grad, params.weight);
  const Tensor out =
      graph->pointwise(of_result, graph::input(*graph, "saved", kSaved, params.saved),
                       activation_gradient_node(params.activation));
  graph::output(out, kOut, params.out);
  if (params.sum.rank > 0) {
    const auto sum = graph->reduction(
        out, fe::graph::Reduction_attributes().set_name("sum").set_mode(fe::ReductionMode_t::ADD));
    graph::output(sum, kSum, params.sum);
  }
  return graph;
}

LinearProblem problem_of(LinearStep step, Activation activation, const graph::TensorDesc& left,
                         const graph::TensorDesc& out) {
  return {step, activation, out.sizes[1], out.sizes[2], left.sizes[2]};
}

std::string forward_engine(const LinearParams& params, const graph::Target& target) {
  const auto step = params.before.rank > 0 ? LinearStep::kTraining : LinearStep::kInference;
  return measured_plan_engine(target.sm_version(),
                              problem_of(step, params.activation, params.input, params.out));
}

std::string hidden_gradient_engine(const HiddenGradientParams& params,
                                   const graph::Target& target) {
  return measured_plan_engine(
      target.sm_version(),
      problem_of(LinearStep::kHiddenGradient, params.activation, params.grad, params.out));
}

// Engine 4, which a live Hopper GPU has, compiles a kernel in one of 64 tilings. The heuristics
// name a few; these are what was the fastest at any of seven large sizes (H200, cuDNN 9.19), where
// all of them and those of engine 7 were tried.
template <class Params>
std::vector<std::string> good_tilings(const Params& /*params*/, const graph::Target& target) {
  if (target.sm_version() != 90) return {};
  std::vector<std::string> engines;
  for (const int tiling : {0, 1, 2, 9, 12, 20, 23, 40, 44, 45}) {
    engines.push_back("eng4_k24=" + std::to_string(tiling));
  }
  return engines;
}

const graph::RegisterPlanKind<LinearParams, make_forward, forward_engine,
                              graph::no_other_graph<LinearParams>, good_tilings<LinearParams>>
    forward_kind;
const graph::RegisterPlanKind<HiddenGradientParams, make_hidden_gradient, hidden_gradient_engine,
                              graph::no_other_graph<HiddenGradientParams>,
                              good_tilings<HiddenGradientParams>>
    hidden_gradient_kind;

}  // namespace
}  // namespace cudnn_ops::linear_graph
