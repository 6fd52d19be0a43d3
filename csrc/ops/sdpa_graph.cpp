// Scaled dot-product attention as cuDNN graphs. The frontend lives here and not in
// sdpa_cuda.cpp, so that touching the kernel does not compile the frontend again.

#include "sdpa.h"

#include "../graph/frontend.h"
#include "../graph/plan_kind.h"

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
  kOffsets,                          // of kQuery; of tensor t at kOffsets + t - kQuery
  kLengths = kOffsets + kGradValue,  // of the queries
  kLengthsKv,
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

// An input, or the result of a node, as `desc` says; a ragged plan is told where its sequences
// begin. Keys and queries may differ in length, so every tensor has offsets of its own.
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

void add_offsets(graph::FrontendGraph& graph, const Tensor& tensor, int64_t uid, int64_t batch) {
  tensor->set_ragged_offset(
      graph::index_input(graph, "offsets", kOffsets + uid - kQuery, at::kLong, batch + 1));
}

Tensor input(graph::FrontendGraph& graph, const char* name, int64_t uid,
             const graph::TensorDesc& desc, bool is_ragged) {
  const auto tensor = graph::input(graph, name, uid, desc);
  if (is_ragged) add_offsets(graph, tensor, uid, desc.sizes[0]);
  return tensor;
}

void output(graph::FrontendGraph& graph, const Tensor& tensor, int64_t uid,
            const graph::TensorDesc& desc, bool is_ragged) {
  graph::output(tensor, uid, desc);
  if (is_ragged) add_offsets(graph, tensor, uid, desc.sizes[0]);
}

template <class Attributes>
void set_lengths(graph::FrontendGraph& graph, Attributes& attributes, int64_t batch) {
  attributes.set_padding_mask(true)
      .set_seq_len_q(graph::index_input(graph, "seq_len_q", kLengths, at::kInt, batch))
      .set_seq_len_kv(graph::index_input(graph, "seq_len_kv", kLengthsKv, at::kInt, batch));
}

std::shared_ptr<graph::FrontendGraph> make_forward(const SdpaForwardParams& params,
                                                   const graph::Target& target) {
  const bool ragged = params.is_ragged;
  auto graph = graph::new_graph(target, params.query.dtype);
  const auto query = input(*graph, "query", kQuery, params.query, ragged);
  const auto key = input(*graph, "key", kKey, params.key, ragged);
  const auto value = input(*graph, "value", kValue, params.value, ragged);
  auto attributes = fe::graph::SDPA_attributes()
                        .set_name("sdpa")
                        .set_generate_stats(params.with_lse)
                        .set_attn_scale(graph::host_scalar(*graph, "scale", kScale));
  if (params.is_causal) set_causal(attributes);
  if (ragged) set_lengths(*graph, attributes, params.query.sizes[0]);

  const auto [out, lse] = graph->sdpa(query, key, value, attributes);
  output(*graph, out, kOut, params.out, ragged);
  if (params.with_lse) graph::output(lse, kLse, lse_desc(params.query));
  return graph;
}

std::shared_ptr<graph::FrontendGraph> make_backward(const SdpaBackwardParams& params,
                                                    const graph::Target& target) {
  const bool ragged = params.is_ragged;
  auto graph = graph::new_graph(target, params.query.dtype);
  const auto query = input(*graph, "query", kQuery, params.query, ragged);
  const auto key = input(*graph, "key", kKey, params.key, ragged);
  const auto value = input(*graph, "value", kValue, params.value, ragged);
  const auto out = input(*graph, "out", kOut, params.out, ragged);
  const auto lse = graph::input(*graph, "lse", kLse, lse_desc(params.query));
  const auto grad_out = input(*graph, "grad_out", kGradOut, params.grad_out, ragged);
  auto attributes = fe::graph::SDPA_backward_attributes()
                        .set_name("sdpa_backward")
                        .set_deterministic_algorithm(params.is_deterministic)
                        .set_attn_scale(graph::host_scalar(*graph, "scale", kScale));
  if (params.is_causal) set_causal(attributes);
  if (ragged) set_lengths(*graph, attributes, params.query.sizes[0]);

  const auto [grad_query, grad_key, grad_value] =
      graph->sdpa_backward(query, key, value, out, grad_out, lse, attributes);
  output(*graph, grad_query, kGradQuery, params.grad_query, ragged);
  output(*graph, grad_key, kGradKey, params.grad_key, ragged);
  output(*graph, grad_value, kGradValue, params.grad_value, ragged);
  return graph;
}

const graph::RegisterPlanKind<SdpaForwardParams, make_forward> forward_kind;
const graph::RegisterPlanKind<SdpaBackwardParams, make_backward> backward_kind;

}  // namespace
}  // namespace cudnn_ops
