// Attention over padded sequences whose lengths the device knows: polymorphic plans as they are,
// so a CUDA graph that holds one is replayed with other lengths by writing to `seq_lens_*`.

#include "sdpa_cuda.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

void check_lengths(const at::Tensor& lengths, const at::Tensor& query, const char* name) {
  TORCH_CHECK_VALUE(
      lengths.scalar_type() == at::kInt && lengths.dim() == 1 && lengths.size(0) == query.size(0) &&
          lengths.is_contiguous() && lengths.device() == query.device(),
      "cudnn_ops.sdpa: ", name, " must be a contiguous int32 tensor [batch] on ", query.device(),
      ", got ", lengths.scalar_type(), " of shape ", lengths.sizes(), " on ", lengths.device());
}

std::tuple<at::Tensor, at::Tensor> sdpa_padded(const at::Tensor& query_, const at::Tensor& key_,
                                               const at::Tensor& value_,
                                               const at::Tensor& seq_lens_q,
                                               const at::Tensor& seq_lens_kv, bool is_causal,
                                               std::optional<double> scale_) {
  check_sdpa(query_, key_, value_, std::nullopt, 0.0, scale_, /*enable_gqa=*/true);
  check_lengths(seq_lens_q, query_, "seq_lens_q");
  check_lengths(seq_lens_kv, query_, "seq_lens_kv");
  const c10::cuda::CUDAGuard device_guard(query_.device());
  graph::require_sm80("cudnn_ops.sdpa", query_.get_device());
  const auto sizes = query_.sizes();
  const at::Tensor out = empty_like_order({sizes[0], sizes[1], sizes[2], value_.size(3)}, query_);
  const at::Tensor lse =
      at::detail::empty_cuda(sizes.slice(0, 3), at::kFloat, query_.device(), std::nullopt);
  if (out.numel() == 0 || key_.size(2) == 0) {
    return {out.zero_(), lse.fill_(-std::numeric_limits<double>::infinity())};
  }
  Scale scale(scale_, query_);
  const at::Tensor query = addressable(scale.applied_to(query_), query_);
  const at::Tensor key = addressable(key_, key_);
  const at::Tensor value = addressable(value_, value_);
  run_padded(SdpaForwardParams{TensorDesc::of(query), TensorDesc::of(key), TensorDesc::of(value),
                               TensorDesc::of(out), is_causal, /*with_lse=*/true},
             {query, key, value, out, lse}, {seq_lens_q, seq_lens_kv}, &scale.value);
  return {out, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sdpa_padded_backward(
    const at::Tensor& grad_out_, const at::Tensor& query_, const at::Tensor& key_,
    const at::Tensor& value_, const at::Tensor& out_, const at::Tensor& lse_,
    const at::Tensor& seq_lens_q, const at::Tensor& seq_lens_kv, bool is_causal,
    std::optional<double> scale_) {
  check_sdpa_backward(grad_out_, query_, key_, value_, out_, lse_);
  check_lengths(seq_lens_q, query_, "seq_lens_q");
  check_lengths(seq_lens_kv, query_, "seq_lens_kv");
  const c10::cuda::CUDAGuard device_guard(query_.device());
  const at::Tensor grad_query = empty_like_order(query_.sizes(), query_);
  const at::Tensor grad_key = empty_like_order(key_.sizes(), key_);
  const at::Tensor grad_value = empty_like_order(value_.sizes(), value_);
  if (out_.numel() == 0 || key_.size(2) == 0) {
    return {grad_query.zero_(), grad_key.zero_(), grad_value.zero_()};
  }
  Scale scale(scale_, query_);
  const auto usable = [](const at::Tensor& tensor, const at::Tensor& like) {
    return addressable(tensor, like, kMaxBackwardElements);
  };
  const at::Tensor query = usable(scale.applied_to(query_), query_);
  const at::Tensor key = usable(key_, key_), value = usable(value_, value_);
  const at::Tensor out = usable(out_, out_), grad_out = usable(grad_out_, out_);
  const at::Tensor lse = lse_.contiguous();
  run_padded(
      SdpaBackwardParams{TensorDesc::of(query), TensorDesc::of(key), TensorDesc::of(value),
                         TensorDesc::of(out), TensorDesc::of(grad_out), TensorDesc::of(grad_query),
                         TensorDesc::of(grad_key), TensorDesc::of(grad_value), is_causal,
                         at::globalContext().deterministicAlgorithms()},
      {query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value},
      {seq_lens_q, seq_lens_kv}, &scale.value);
  if (scale.query_sign != 1) grad_query.mul_(scale.query_sign);
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Rows beyond a sequence's length are 0 in the results and -inf in lse; what they hold in the
  // inputs is not used. Lengths are not checked against the sizes: that would need the host.
  m.def(
      "_sdpa_padded(Tensor query, Tensor key, Tensor value, Tensor seq_lens_q, "
      "Tensor seq_lens_kv, bool is_causal, float? scale) -> (Tensor out, Tensor lse)");
  m.def(
      "_sdpa_padded_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
      "Tensor lse, Tensor seq_lens_q, Tensor seq_lens_kv, bool is_causal, float? scale) -> "
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value)");
}

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_sdpa_padded", cudnn_ops::sdpa_padded);
  m.impl("_sdpa_padded_backward", cudnn_ops::sdpa_padded_backward);
}
