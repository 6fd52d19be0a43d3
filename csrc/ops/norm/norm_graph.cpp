// Layer norm and RMS norm as cuDNN graphs.

#include "ops/norm/norm_choice.h"
#include "ops/norm/norm_params.h"

#include "graph/frontend.h"
#include "graph/plan_kind.h"

namespace cudnn_ops::norm_graph {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// A plan expects the addresses in ascending uid order: norm_cuda.cpp gives them in this order.
enum Uid : int64_t {
  kInput = 1,
  kWeight,
  kBias,
  kEps,
  kGradOut,
  kMean,
  kRstd,
  kOut,
  kGradWeight,
  kGradBias,
};

graph::TensorDesc stats_desc(const graph::TensorDesc& input) {
  graph::TensorDesc desc(at::kFloat, {input.sizes[0], 1, 1, 1}, {1, 1, 1, 1});
  desc.strides = {1, 1, 1, 1};
  return desc;
}

// The weight as an input, plus 1 where it is centered at zero: in float32, because beside 1 a lower
// precision would lose most of it.
Tensor weight_input(graph::FrontendGraph& graph, const graph::TensorDesc& desc,
                    bool zero_centered) {
  if (desc.rank == 0) return nullptr;
  const auto weight = graph::input(graph, "weight", kWeight, desc);
  if (!zero_centered) return weight;
  const auto one = std::make_shared<fe::graph::Tensor_attributes>(1.0F);
  const auto factor = graph.pointwise(weight, one,
                                      fe::graph::Pointwise_attributes()
                                          .set_name("centered_at_one")
                                          .set_mode(fe::PointwiseMode_t::ADD));
  factor->set_data_type(fe::DataType_t::FLOAT);
  return factor;
}

std::shared_ptr<graph::FrontendGraph> make_forward(const NormParams& params,
                                                   const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.input.dtype);
  const auto input = graph::input(*graph, "input", kInput, params.input);
  const auto weight = weight_input(*graph, params.weight, params.zero_centered);
  Tensor bias = params.bias.rank == 0 ? nullptr : graph::input(*graph, "bias", kBias, params.bias);
  auto eps = graph::host_scalar(*graph, "eps", kEps);
  const auto phase =
      params.with_stats ? fe::NormFwdPhase_t::TRAINING : fe::NormFwdPhase_t::INFERENCE;
  Tensor out, mean, rstd;
  if (params.is_layer) {
    const auto results = graph->layernorm(
        input, weight, bias,
        fe::graph::Layernorm_attributes().set_name("norm").set_forward_phase(phase).set_epsilon(
            eps));
    out = results[0], mean = results[1], rstd = results[2];
  } else {
    const auto results = graph->rmsnorm(
        input, weight,
        fe::graph::Rmsnorm_attributes().set_name("norm").set_forward_phase(phase).set_epsilon(eps));
    out = results[0], rstd = results[1];
  }
  graph::output(out, kOut, params.input);
  if (!params.with_stats) return graph;
  if (params.is_layer) graph::output(mean, kMean, stats_desc(params.input));
  graph::output(rstd, kRstd, stats_desc(params.input));
  return graph;
}

std::shared_ptr<graph::FrontendGraph> make_backward(const NormBackwardParams& params,
                                                    const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.input.dtype);
  const auto input = graph::input(*graph, "input", kInput, params.input);
  const auto weight = weight_input(*graph, params.weight, params.zero_centered);
  const auto grad_out = graph::input(*graph, "grad_out", kGradOut, params.input);
  const auto rstd = graph::input(*graph, "rstd", kRstd, stats_desc(params.input));
  std::array<Tensor, 3> grads;
  if (params.is_layer) {
    const auto mean = graph::input(*graph, "mean", kMean, stats_desc(params.input));
    grads = graph->layernorm_backward(grad_out, input, weight,
                                      fe::graph::Layernorm_backward_attributes()
                                          .set_name("norm_backward")
                                          .set_saved_mean_and_inv_variance(mean, rstd));
  } else {
    grads = graph->rmsnorm_backward(
        grad_out, input, weight, rstd,
        fe::graph::Rmsnorm_backward_attributes().set_name("norm_backward").has_dbias(false));
  }
  graph::output(grads[0], kOut, params.input);
  graph::output(grads[1], kGradWeight, params.weight);
  if (params.is_layer) graph::output(grads[2], kGradBias, params.weight);
  return graph;
}

std::string measured_engine(const graph::TensorDesc& input, NormPlan plan, bool is_layer,
                            const graph::Target& target) {
  const auto row_bytes = input.sizes[1] * static_cast<int64_t>(c10::elementSize(input.dtype));
  return nearest_engine(target.sm_version(), plan, is_layer, row_bytes, input.sizes[0]);
}

std::string forward_engine(const NormParams& params, const graph::Target& target) {
  return measured_engine(params.input,
                         params.with_stats ? NormPlan::kTraining : NormPlan::kInference,
                         params.is_layer, target);
}

std::string backward_engine(const NormBackwardParams& params, const graph::Target& target) {
  return measured_engine(params.input, NormPlan::kBackward, params.is_layer, target);
}

const graph::RegisterPlanKind<NormParams, make_forward, forward_engine> forward_kind;
const graph::RegisterPlanKind<NormBackwardParams, make_backward, backward_engine> backward_kind;

}  // namespace
}  // namespace cudnn_ops::norm_graph
