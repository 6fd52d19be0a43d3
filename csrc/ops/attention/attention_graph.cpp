// Scaled dot-product attention as cuDNN graphs. The frontend lives here and not in
// sdpa_cuda.cpp, so that touching the kernel does not compile the frontend again.

#include "ops/attention/attention_graph.h"
#include "ops/attention/paged/paged_params.h"

#include "graph/cudnn_library.h"
#include "graph/plan_kind.h"

#include <string>

namespace cudnn_ops::attention_graph {
namespace {

std::shared_ptr<graph::FrontendGraph> make_forward(const SdpaForwardParams& params,
                                                   const graph::Target& target) {
  Builder<fe::graph::SDPA_attributes> builder(params, params.key.sizes[2], target);
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = builder.input("key", kKey, params.key);
  const auto value = builder.input("value", kValue, params.value);
  auto attributes =
      fe::graph::SDPA_attributes().set_name("sdpa").set_generate_stats(params.with_lse);
  builder.set_mask(attributes);

  const auto [out, lse] = builder.graph()->sdpa(query, key, value, attributes);
  builder.output(out, kOut, params.out);
  if (params.with_lse) builder.lse_output(lse, params.lse_stride);
  return builder.graph();
}

std::shared_ptr<graph::FrontendGraph> make_paged(const PagedParams& params,
                                                 const graph::Target& target) {
  const int64_t length_kv = params.page_table.sizes[2] * params.key_cache.sizes[2];
  Builder<fe::graph::SDPA_attributes> builder(params, length_kv, target);
  auto& graph = *builder.graph();
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = graph::input(graph, "key_cache", kKey, params.key_cache);
  const auto value = graph::input(graph, "value_cache", kValue, params.value_cache);
  const auto table = graph::input(graph, "page_table", kPageTable, params.page_table);
  auto attributes = fe::graph::SDPA_attributes()
                        .set_name("paged_attention")
                        .set_generate_stats(params.with_lse)
                        .set_paged_attention_k_table(table)
                        .set_paged_attention_v_table(table)
                        .set_paged_attention_max_seq_len_kv(static_cast<int>(length_kv));
  builder.set_mask(attributes);
  const auto [out, lse] = graph.sdpa(query, key, value, attributes);
  builder.output(out, kOut, params.out);
  if (params.with_lse) builder.lse_output(lse, params.lse_stride);
  return builder.graph();
}

// For decoding cuDNN 9.19 names configuration 35 of its engine, whose tiles have 16 rows. Measured
// on an H100 and an H200: 34 takes 1 to 4 % less time where all heads find room on the GPU at once,
// and up to 3 % more where they do not and sequences differ in length; 33 is for more rows.
std::string paged_engine(const PagedParams& params, const graph::Target& target) {
  constexpr int64_t kRows = 16, kRoom = 128;
  const bool is_measured = target.sm_version() == 90 && graph::cudnn().version / 100 == 919;
  if (!is_measured || !is_decoding(params)) return {};
  const int64_t heads = params.key_cache.sizes[1];
  if (params.query.sizes[1] > kRows * heads) return "eng8_k24=33";
  return params.query.sizes[0] * heads <= kRoom ? "eng8_k24=34" : "";
}

std::shared_ptr<graph::FrontendGraph> make_backward(const SdpaBackwardParams& params,
                                                    const graph::Target& target) {
  Builder<fe::graph::SDPA_backward_attributes> builder(params, params.key.sizes[2], target);
  const auto query = builder.input("query", kQuery, params.query);
  const auto key = builder.input("key", kKey, params.key);
  const auto value = builder.input("value", kValue, params.value);
  const auto out = builder.input("out", kOut, params.out);
  const auto lse = builder.lse_input(params.lse_stride);
  const auto grad_out = builder.input("grad_out", kGradOut, params.grad_out);
  auto attributes = fe::graph::SDPA_backward_attributes()
                        .set_name("sdpa_backward")
                        .set_deterministic_algorithm(params.is_deterministic);
  builder.set_mask(attributes);
  if (params.grad_bias.rank != 0) {
    auto grad_bias = std::make_shared<fe::graph::Tensor_attributes>();
    graph::output(grad_bias, kGradBias, params.grad_bias);
    attributes.set_dbias(grad_bias);
  }

  const auto [grad_query, grad_key, grad_value] =
      builder.graph()->sdpa_backward(query, key, value, out, grad_out, lse, attributes);
  builder.output(grad_query, kGradQuery, params.grad_query);
  builder.output(grad_key, kGradKey, params.grad_key);
  builder.output(grad_value, kGradValue, params.grad_value);
  return builder.graph();
}

const graph::RegisterPlanKind<SdpaForwardParams, make_forward> forward_kind;
const graph::RegisterPlanKind<PagedParams, make_paged, paged_engine> paged_kind;
const graph::RegisterPlanKind<SdpaBackwardParams, make_backward> backward_kind;

}  // namespace
}  // namespace cudnn_ops::attention_graph
