// "Which plan would this attention need?": the key that a call would make, from the sizes,
// strides and dtypes of its tensors alone. What asks, warms up or tunes starts from here.

#include "sdpa.h"
#include "sdpa_ragged.h"

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
std::vector<int64_t> words(const Params& params, bool polymorphic) {
  if (!polymorphic) return graph::PlanKey::of(params, 0).words().vec();
  const auto declared = ragged(params);
  return declared ? graph::PlanKey::of(*declared, 0).words().vec() : std::vector<int64_t>();
}

std::tuple<std::vector<int64_t>, std::string> plan_key(const at::Tensor& query,
                                                       const at::Tensor& key,
                                                       const at::Tensor& value, bool is_causal,
                                                       bool with_lse, bool backward,
                                                       bool polymorphic) {
  check_sdpa_shapes(query, key, value, /*enable_gqa=*/true);
  if (query.scalar_type() != at::kHalf && query.scalar_type() != at::kBFloat16) {
    return {std::vector<int64_t>(), "cudnn_ops.sdpa runs float16 and bfloat16 on a GPU"};
  }
  const auto out = dense_desc({query.size(0), query.size(1), query.size(2), value.size(3)}, query);
  const auto q = desc_of(query), k = desc_of(key), v = desc_of(value);
  auto result =
      backward
          ? words(
                SdpaBackwardParams{q, k, v, out, /*grad_out=*/out, dense_desc(query.sizes(), query),
                                   dense_desc(key.sizes(), key), dense_desc(value.sizes(), value),
                                   is_causal, at::globalContext().deterministicAlgorithms()},
                polymorphic)
          : words(SdpaForwardParams{q, k, v, out, is_causal, with_lse}, polymorphic);
  const char* refusal =
      result.empty()
          ? "a polymorphic plan would be declared for over 2^31 elements or 65535 sequences"
          : "";
  return {std::move(result), refusal};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Tensors on the meta device: only their sizes, strides and dtypes are read. Without a plan,
  // `words` is empty and `refusal` says why.
  m.def(
      "_sdpa_plan_key(Tensor query, Tensor key, Tensor value, bool is_causal, bool with_lse, "
      "bool backward, bool polymorphic) -> (int[] words, str refusal)",
      cudnn_ops::plan_key);
}
