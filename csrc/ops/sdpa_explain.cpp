// "Would cuDNN take this attention on that GPU?": builds the very plan that a call would
// build, for the live or a described GPU, and reports on it. The plan goes to the cache.

#include "sdpa.h"

#include "../graph/device_query.h"
#include "../graph/plan_cache.h"

#include <ATen/Context.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

TensorDesc dense_desc(c10::IntArrayRef sizes, const at::Tensor& like) {
  return {like.scalar_type(), sizes, dense_strides_like(sizes, like)};
}

// What the kernel would hand to cuDNN: the tensor as it lies, or a dense copy of it.
TensorDesc desc_of(const at::Tensor& tensor) {
  return graph::is_addressable(tensor) ? TensorDesc::of(tensor)
                                       : dense_desc(tensor.sizes(), tensor);
}

template <class Params>
std::shared_ptr<const graph::Plan> plan_of(const Params& params, const graph::Target& target) {
  return graph::PlanCache::global().get(graph::PlanKey::of(params),
                                        [&] { return build_sdpa(params, target); });
}

graph::Answer explain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      bool is_causal, bool with_lse, bool backward, const std::string& device) {
  check_sdpa_shapes(query, key, value, /*enable_gqa=*/true);
  if (query.scalar_type() != at::kHalf && query.scalar_type() != at::kBFloat16) {
    return {false, "cudnn_ops.sdpa runs float16 and bfloat16 on a GPU", "", 0};
  }
  const auto out = dense_desc({query.size(0), query.size(1), query.size(2), value.size(3)}, query);
  const auto q = desc_of(query), k = desc_of(key), v = desc_of(value);
  return graph::ask(device, [&](const graph::Target& target) {
    if (backward) {
      return plan_of(
          SdpaBackwardParams{target.id(), q, k, v, out, /*grad_out=*/out,
                             dense_desc(query.sizes(), query), dense_desc(key.sizes(), key),
                             dense_desc(value.sizes(), value), is_causal,
                             at::globalContext().deterministicAlgorithms()},
          target);
    }
    return plan_of(SdpaForwardParams{target.id(), q, k, v, out, is_causal, with_lse}, target);
  });
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Tensors on the meta device: only their sizes, strides and dtypes are read.
  m.def(
      "_sdpa_explain(Tensor query, Tensor key, Tensor value, bool is_causal, bool with_lse, "
      "bool backward, str device) -> (bool supported, str reason, str engine, int workspace)",
      cudnn_ops::explain);
}
