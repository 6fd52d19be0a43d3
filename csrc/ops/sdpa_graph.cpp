// Scaled dot-product attention as cuDNN graphs. The frontend lives here and not in
// sdpa_cuda.cpp, so that touching the kernel does not compile the frontend again.

#include "sdpa.h"

#include "../graph/frontend.h"

namespace cudnn_ops {
namespace {

namespace fe = cudnn_frontend;

// Plans take addresses in ascending uid order: this is the order that sdpa.h promises.
enum Uid : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kScale,
  kOut,
  kLse,
  kGradOut,
  kGradQuery,
  kGradKey,
  kGradValue,
};

// [B, Hq, Sq, 1], dense: before 9.26 cuDNN reads its "stats" with these strides and no others,
// dimensions of size 1 included.
graph::TensorDesc lse_desc(const graph::TensorDesc& query) {
  const int64_t heads = query.sizes[1];
  const int64_t length = query.sizes[2];
  graph::TensorDesc desc(c10::ScalarType::Float, {query.sizes[0], heads, length, 1}, {0, 0, 0, 1});
  desc.strides = {heads * length, length, 1, 1};
  return desc;
}

template <class Attributes>
void set_causal(Attributes& attributes) {
  attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
      .set_diagonal_band_right_bound(0);
}

}  // namespace

std::shared_ptr<const graph::Plan> build_sdpa(const SdpaForwardParams& params,
                                              const graph::Target& target) {
  auto graph = graph::new_graph(target, params.query.dtype);
  const auto query = graph::input(*graph, "query", kQuery, params.query);
  const auto key = graph::input(*graph, "key", kKey, params.key);
  const auto value = graph::input(*graph, "value", kValue, params.value);
  auto attributes = fe::graph::SDPA_attributes()
                        .set_name("sdpa")
                        .set_generate_stats(params.with_lse)
                        .set_attn_scale(graph::host_scalar(*graph, "scale", kScale));
  if (params.is_causal) set_causal(attributes);

  const auto [out, lse] = graph->sdpa(query, key, value, attributes);
  graph::output(out, kOut, params.out);
  if (params.with_lse) graph::output(lse, kLse, lse_desc(params.query));
  return graph::Plan::build(std::move(graph), target);
}

std::shared_ptr<const graph::Plan> build_sdpa(const SdpaBackwardParams& params,
                                              const graph::Target& target) {
  auto graph = graph::new_graph(target, params.query.dtype);
  const auto query = graph::input(*graph, "query", kQuery, params.query);
  const auto key = graph::input(*graph, "key", kKey, params.key);
  const auto value = graph::input(*graph, "value", kValue, params.value);
  const auto out = graph::input(*graph, "out", kOut, params.out);
  const auto lse = graph::input(*graph, "lse", kLse, lse_desc(params.query));
  const auto grad_out = graph::input(*graph, "grad_out", kGradOut, params.grad_out);
  auto attributes = fe::graph::SDPA_backward_attributes()
                        .set_name("sdpa_backward")
                        .set_deterministic_algorithm(params.is_deterministic)
                        .set_attn_scale(graph::host_scalar(*graph, "scale", kScale));
  if (params.is_causal) set_causal(attributes);

  const auto [grad_query, grad_key, grad_value] =
      graph->sdpa_backward(query, key, value, out, grad_out, lse, attributes);
  graph::output(grad_query, kGradQuery, params.grad_query);
  graph::output(grad_key, kGradKey, params.grad_key);
  graph::output(grad_value, kGradValue, params.grad_value);
  return graph::Plan::build(std::move(graph), target);
}

}  // namespace cudnn_ops
