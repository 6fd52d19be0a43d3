// FP8 attention as cuDNN graphs: under a scale of each tensor, forward and backward, and MXFP8.

#include "ops/attention/attention_graph.h"
#include "ops/attention/fp8/sdpa_fp8_params.h"
#include "ops/attention/fp8/sdpa_mxfp8_params.h"

#include "graph/plan_kind.h"

namespace cudnn_ops::attention_graph {
namespace {

// One float32 on the device.
graph::TensorDesc number_desc() {
  return {c10::ScalarType::Float, {1, 1, 1, 1}, {1, 1, 1, 1}};
}

std::shared_ptr<graph::FrontendGraph> make_fp8(const SdpaFp8Params& params,
                                               const graph::Target& target) {
  Builder<fe::graph::SDPA_fp8_attributes> builder(params, params.key.sizes[2], target);
  auto& graph = *builder.graph();
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = builder.input("key", kKey, params.key);
  const auto value = builder.input("value", kValue, params.value);
  const auto number = [&](const char* name, int64_t uid) {
    return graph::input(graph, name, uid, number_desc());
  };
  const auto descale_query = number("descale_q", kDescaleQuery);
  const auto descale_key = number("descale_k", kDescaleKey);
  const auto descale_value = number("descale_v", kDescaleValue);
  const auto descale = number("descale_s", kDescaleProbabilities);
  const auto scale = number("scale_s", kScaleProbabilities);
  const auto scale_out = number("scale_o", kScaleOut);
  auto attributes =
      fe::graph::SDPA_fp8_attributes().set_name("sdpa_fp8").set_generate_stats(params.with_lse);
  builder.set_mask(attributes);
  const auto [out, lse, amax, amax_out] =
      graph.sdpa_fp8(query, key, value, descale_query, descale_key, descale_value, descale, scale,
                     scale_out, attributes);
  builder.output(out, kOut, params.out);
  if (params.with_lse) builder.lse_output(lse, /*stride=*/0);
  graph::output(amax, kAmaxProbabilities, number_desc());
  graph::output(amax_out, kAmaxOut, number_desc());
  return builder.graph();
}

std::shared_ptr<graph::FrontendGraph> make_fp8_backward(const SdpaFp8BackwardParams& params,
                                                        const graph::Target& target) {
  Builder<fe::graph::SDPA_fp8_backward_attributes> builder(params, params.key.sizes[2], target);
  auto& graph = *builder.graph();
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = builder.input("key", kKey, params.key);
  const auto value = builder.input("value", kValue, params.value);
  const auto out = builder.input("out", kOut, params.out);
  const auto lse = builder.lse_input(/*stride=*/0);
  const auto grad_out = builder.input("grad_out", kGradOut, params.grad_out);
  const auto number = [&](const char* name, int64_t uid) {
    return graph::input(graph, name, uid, number_desc());
  };
  auto attributes = fe::graph::SDPA_fp8_backward_attributes().set_name("sdpa_fp8_backward");
  builder.set_mask(attributes);
  const auto results = graph.sdpa_fp8_backward(
      query, key, value, out, grad_out, lse, number("descale_q", kDescaleQuery),
      number("descale_k", kDescaleKey), number("descale_v", kDescaleValue),
      number("descale_o", kDescaleOut), number("descale_do", kDescaleGradOut),
      number("descale_s", kDescaleProbabilities), number("descale_dp", kDescaleGradScores),
      number("scale_s", kScaleProbabilities), number("scale_dq", kScaleGradQuery),
      number("scale_dk", kScaleGradKey), number("scale_dv", kScaleGradValue),
      number("scale_dp", kScaleGradScores), attributes);
  builder.output(results[0], kGradQuery, params.grad_query);
  builder.output(results[1], kGradKey, params.grad_key);
  builder.output(results[2], kGradValue, params.grad_value);
  graph::output(results[3], kAmaxGradQuery, number_desc());
  graph::output(results[4], kAmaxGradKey, number_desc());
  graph::output(results[5], kAmaxGradValue, number_desc());
  graph::output(results[6], kAmaxGradScores, number_desc());
  return builder.graph();
}

// The scales of blocks of 32, 1 x 32 of a matrix of `rows`; in memory the order of tensor cores.
std::shared_ptr<fe::graph::Tensor_attributes> block_scales(graph::FrontendGraph& graph,
                                                           const char* name, int64_t uid,
                                                           const MxScales& scales) {
  const auto tensor = graph::input(graph, name, uid, scales.desc());
  tensor->set_data_type(fe::DataType_t::FP8_E8M0)
      .set_reordering_type(fe::TensorReordering_t::F8_128x4);
  return tensor;
}

std::shared_ptr<graph::FrontendGraph> make_mxfp8(const SdpaMxFp8Params& params,
                                                 const graph::Target& target) {
  Builder<fe::graph::SDPA_fp8_attributes> builder(params, params.key.sizes[2], target);
  auto& graph = *builder.graph();
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = builder.input("key", kKey, params.key);
  const auto value = builder.input("value", kValue, params.value);
  const auto descale_query =
      block_scales(graph, "descale_q", kDescaleQuery, MxScales::of_rows(params.query));
  const auto descale_key =
      block_scales(graph, "descale_k", kDescaleKey, MxScales::of_rows(params.key));
  const auto descale_value =
      block_scales(graph, "descale_v", kDescaleValue, MxScales::of_columns(params.value));
  auto attributes =
      fe::graph::SDPA_fp8_attributes().set_name("sdpa_mxfp8").set_generate_stats(true);
  builder.set_mask(attributes);
  const auto [out, lse, amax_out] =
      graph.sdpa_fp8(query, key, value, descale_query, descale_key, descale_value, attributes);
  builder.output(out, kOut, params.out);
  builder.lse_output(lse, /*stride=*/0);
  graph::output(amax_out, kAmaxOut, number_desc());
  return builder.graph();
}

const graph::RegisterPlanKind<SdpaFp8Params, make_fp8> fp8_kind;
const graph::RegisterPlanKind<SdpaFp8BackwardParams, make_fp8_backward> fp8_backward_kind;
const graph::RegisterPlanKind<SdpaMxFp8Params, make_mxfp8> mxfp8_kind;

}  // namespace
}  // namespace cudnn_ops::attention_graph
