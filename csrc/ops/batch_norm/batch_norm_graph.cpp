// Batch norm in training as cuDNN graphs.

#include "ops/batch_norm/batch_norm_params.h"

#include "graph/frontend.h"
#include "graph/image_desc.h"
#include "graph/plan_kind.h"

namespace cudnn_ops::batch_norm_graph {
namespace {

namespace fe = cudnn_frontend;

// A plan expects the addresses in ascending uid order: batch_norm_plans_cuda.cpp gives them in this
// order.
enum Uid : int64_t {
  kInput = 1,
  kWeight,
  kBias,
  kRunningMean,
  kRunningVar,
  kEps,
  kMomentum,
  kMeanRead,
  kRstdRead,
  kGradOut,
  kMean,
  kRstd,
  kNextMean,
  kNextVar,
  kOut,
  kGradWeight,
  kGradBias,
};

graph::TensorDesc channels_desc(const graph::TensorDesc& image) {
  std::array<int64_t, graph::TensorDesc::kMaxRank> sizes{1, image.sizes[1], 1, 1, 1};
  return graph::channels_last_desc(at::kFloat, {sizes.data(), static_cast<size_t>(image.rank)});
}

std::shared_ptr<graph::FrontendGraph> make_forward(const BatchNormParams& params,
                                                   const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.input.dtype);
  const auto channels = channels_desc(params.input);
  const auto input = graph::input(*graph, "input", kInput, params.input);
  const auto weight = graph::input(*graph, "weight", kWeight, channels);
  const auto bias = graph::input(*graph, "bias", kBias, channels);
  auto eps = graph::host_scalar(*graph, "eps", kEps);
  auto attributes = fe::graph::Batchnorm_attributes().set_name("norm").set_epsilon(eps);
  if (params.has_running) {
    auto running_mean = graph::input(*graph, "running_mean", kRunningMean, channels);
    auto running_var = graph::input(*graph, "running_var", kRunningVar, channels);
    auto momentum = graph::host_scalar(*graph, "momentum", kMomentum);
    attributes.set_previous_running_stats(running_mean, running_var, momentum);
  }
  const auto [out, mean, rstd, next_mean, next_var] =
      graph->batchnorm(input, weight, bias, attributes);
  graph::output(mean, kMean, channels);
  graph::output(rstd, kRstd, channels);
  if (params.has_running) {
    graph::output(next_mean, kNextMean, channels);
    graph::output(next_var, kNextVar, channels);
  }
  graph::output(out, kOut, params.input);
  return graph;
}

std::shared_ptr<graph::FrontendGraph> make_backward(const BatchNormBackwardParams& params,
                                                    const graph::Target& target) {
  const auto graph = graph::new_graph(target, params.input.dtype);
  const auto channels = channels_desc(params.input);
  const auto input = graph::input(*graph, "input", kInput, params.input);
  const auto weight = graph::input(*graph, "weight", kWeight, channels);
  const auto mean = graph::input(*graph, "mean", kMeanRead, channels);
  const auto rstd = graph::input(*graph, "rstd", kRstdRead, channels);
  const auto grad = graph::input(*graph, "grad_out", kGradOut, params.input);
  const auto [grad_input, grad_weight, grad_bias] =
      graph->batchnorm_backward(grad, input, weight,
                                fe::graph::Batchnorm_backward_attributes()
                                    .set_name("norm_backward")
                                    .set_saved_mean_and_inv_variance(mean, rstd));
  graph::output(grad_input, kOut, params.input);
  graph::output(grad_weight, kGradWeight, channels);
  graph::output(grad_bias, kGradBias, channels);
  return graph;
}

const graph::RegisterPlanKind<BatchNormParams, make_forward> forward_kind;
const graph::RegisterPlanKind<BatchNormBackwardParams, make_backward> backward_kind;

}  // namespace
}  // namespace cudnn_ops::batch_norm_graph
