// Scaled dot-product attention on CUDA: allocate, make the key, run the plan.

#include "sdpa.h"
#include "sdpa_cuda.h"

#include "../graph/cuda_call.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// One more than the largest offset, in elements, from the first element of a nonempty tensor.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

}  // namespace

at::Tensor empty_like_order(c10::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_strided_cuda(sizes, dense_strides_like(sizes, like), like.scalar_type(),
                                        like.device());
}

at::Tensor addressable(const at::Tensor& tensor, const at::Tensor& like, int64_t max_extent) {
  if (graph::is_addressable(tensor) && extent(tensor) <= max_extent) return tensor;
  return empty_like_order(tensor.sizes(), like).copy_(tensor);
}

Scale::Scale(std::optional<double> scale, const at::Tensor& query) {
  value = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3)))));
  // The GPU takes what is smaller than the smallest normal number for zero.
  const bool is_zero = std::abs(value) < std::numeric_limits<float>::min();
  query_sign = is_zero ? 0 : value > 0 ? 1 : -1;
  value = is_zero ? 1.0F : std::abs(value);
}

at::Tensor Scale::applied_to(const at::Tensor& query) const {
  return query_sign == 1 ? query : query.mul(query_sign);
}

namespace {

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query_, const at::Tensor& key_,
                                           const at::Tensor& value_, bool is_causal,
                                           std::optional<double> scale_, bool with_lse) {
  const c10::cuda::CUDAGuard device_guard(query_.device());
  graph::require_sm80("cudnn_ops.sdpa", query_.get_device());
  const int64_t batch = query_.size(0), heads = query_.size(1), length = query_.size(2);
  at::Tensor out = empty_like_order({batch, heads, length, value_.size(3)}, query_);
  at::Tensor lse;
  if (with_lse) {
    lse = at::detail::empty_cuda({batch, heads, length}, at::kFloat, query_.device(), std::nullopt);
  }
  if (out.numel() == 0) return {out, lse};
  if (key_.size(2) == 0) {  // nothing to attend to
    out.zero_();
    if (with_lse) lse.fill_(-std::numeric_limits<double>::infinity());
    return {out, lse};
  }

  Scale scale(scale_, query_);
  const at::Tensor query = addressable(scale.applied_to(query_), query_);
  const at::Tensor key = addressable(key_, key_);
  const at::Tensor value = addressable(value_, value_);
  const SdpaForwardParams params{TensorDesc::of(query), TensorDesc::of(key), TensorDesc::of(value),
                                 TensorDesc::of(out),   is_causal,           with_lse};
  const auto exact = graph::PlanKey::of(params, query.get_device());
  auto plan = graph::ready_plan(exact);
  if (plan == nullptr && run_ragged(params, exact, {query, key, value, out, lse}, &scale.value)) {
    return {out, lse};
  }
  const std::array<void*, 6> pointers{read(query),  read(key),  read(value),
                                      &scale.value, write(out), with_lse ? write(lse) : nullptr};
  const std::array<graph::Call::Written, 2> written{
      {{4, out.nbytes()}, {5, with_lse ? lse.nbytes() : 0}}};
  const graph::Call call =
      forward_call({pointers.data(), with_lse ? 6u : 5u}, {written.data(), with_lse ? 2u : 1u});
  if (plan == nullptr) plan = graph::get_plan(call, exact);
  graph::execute(call, *plan);
  return {out, lse};
}

at::Tensor sdpa_cuda(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  check_sdpa(query, key, value, attn_mask, dropout_p, scale, enable_gqa);
  return std::get<0>(forward(query, key, value, is_causal, scale, /*with_lse=*/false));
}

std::tuple<at::Tensor, at::Tensor> sdpa_with_lse_cuda(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa) {
  check_sdpa(query, key, value, attn_mask, dropout_p, scale, enable_gqa);
  return forward(query, key, value, is_causal, scale, /*with_lse=*/true);
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Gradients sdpa_backward_cuda(const at::Tensor& grad_out, const at::Tensor& query,
                             const at::Tensor& key, const at::Tensor& value, const at::Tensor& out,
                             const at::Tensor& lse, bool is_causal, std::optional<double> scale);

// How to cut a problem that cuDNN's backward cannot take whole: into `count` parts along
// dimension `dim`, 0 the batch, 1 the heads.
struct Cut {
  int64_t dim = 0;
  int64_t count = 1;
};

Cut cut_for_backward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& out) {
  const auto parts = [](int64_t size, int64_t limit) { return (size + limit - 1) / limit; };
  const int64_t batch = query.size(0), heads = query.size(1);
  if (batch > kMaxBackwardRows) return {0, parts(batch, kMaxBackwardRows)};
  if (heads > kMaxBackwardRows) return {1, parts(heads, kMaxBackwardRows)};
  const int64_t largest = std::max({query.numel(), key.numel(), value.numel(), out.numel()});
  return {batch > 1 ? 0 : 1, parts(largest, kMaxBackwardElements)};
}

// The gradients part by part; a part that is still too large is cut again.
Gradients backward_in_parts(const Cut& cut, const Gradients& grads, const at::Tensor& grad_out,
                            const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& out, const at::Tensor& lse, bool is_causal,
                            std::optional<double> scale) {
  // Heads stay together with the others that share their key head.
  const int64_t units = key.size(cut.dim);
  TORCH_CHECK_NOT_IMPLEMENTED(units > 1, "cudnn_ops.sdpa backward: one key head with its queries, ",
                              query.sizes(), " and ", key.sizes(),
                              ", is more than cuDNN takes: 2^31 elements and ", kMaxBackwardRows,
                              " query heads");
  const int64_t step = (units + cut.count - 1) / cut.count;
  for (int64_t start = 0; start < units; start += step) {
    const auto part = [&](const at::Tensor& tensor) {
      const int64_t unit = tensor.size(cut.dim) / units;
      return tensor.narrow(cut.dim, start * unit, std::min(step, units - start) * unit);
    };
    const auto [grad_query, grad_key, grad_value] =
        sdpa_backward_cuda(part(grad_out), part(query), part(key), part(value), part(out),
                           part(lse), is_causal, scale);
    part(std::get<0>(grads)).copy_(grad_query);
    part(std::get<1>(grads)).copy_(grad_key);
    part(std::get<2>(grads)).copy_(grad_value);
  }
  return grads;
}

Gradients sdpa_backward_cuda(const at::Tensor& grad_out_, const at::Tensor& query_,
                             const at::Tensor& key_, const at::Tensor& value_,
                             const at::Tensor& out_, const at::Tensor& lse_, bool is_causal,
                             std::optional<double> scale_) {
  check_sdpa_backward(grad_out_, query_, key_, value_, out_, lse_);
  const c10::cuda::CUDAGuard device_guard(query_.device());
  at::Tensor grad_query = empty_like_order(query_.sizes(), query_);
  at::Tensor grad_key = empty_like_order(key_.sizes(), key_);
  at::Tensor grad_value = empty_like_order(value_.sizes(), value_);
  if (out_.numel() == 0 || key_.size(2) == 0) {
    return {grad_query.zero_(), grad_key.zero_(), grad_value.zero_()};
  }
  if (key_.size(2) == 1) {
    // One key has the whole weight whatever its score. cuDNN refuses a length of 1 on both sides.
    const auto grouped = grad_out_.unflatten(1, {key_.size(1), -1});
    grad_value.copy_(grouped.sum(std::array<int64_t, 2>{2, 3}, false, at::kFloat).unsqueeze(2));
    return {grad_query.zero_(), grad_key.zero_(), grad_value};
  }

  if (const Cut cut = cut_for_backward(query_, key_, value_, out_); cut.count > 1) {
    return backward_in_parts(cut, {grad_query, grad_key, grad_value}, grad_out_, query_, key_,
                             value_, out_, lse_, is_causal, scale_);
  }

  Scale scale(scale_, query_);
  const auto usable = [](const at::Tensor& tensor, const at::Tensor& like) {
    return addressable(tensor, like, kMaxBackwardElements);
  };
  const at::Tensor query = usable(scale.applied_to(query_), query_);
  const at::Tensor key = usable(key_, key_);
  const at::Tensor value = usable(value_, value_);
  const at::Tensor out = usable(out_, out_);
  const at::Tensor grad_out = usable(grad_out_, out_);
  const at::Tensor lse = lse_.contiguous();
  const SdpaBackwardParams params{TensorDesc::of(query),
                                  TensorDesc::of(key),
                                  TensorDesc::of(value),
                                  TensorDesc::of(out),
                                  TensorDesc::of(grad_out),
                                  TensorDesc::of(grad_query),
                                  TensorDesc::of(grad_key),
                                  TensorDesc::of(grad_value),
                                  is_causal,
                                  at::globalContext().deterministicAlgorithms()};
  const auto exact = graph::PlanKey::of(params, query.get_device());
  auto plan = graph::ready_plan(exact);
  if (plan != nullptr ||
      !run_ragged(params, exact,
                  {query, key, value, out, lse, grad_out, grad_query, grad_key, grad_value},
                  &scale.value)) {
    const std::array<void*, 10> pointers{
        read(query), read(key),      read(value),       &scale.value,    read(out),
        read(lse),   read(grad_out), write(grad_query), write(grad_key), write(grad_value)};
    const std::array<graph::Call::Written, 3> written{
        {{7, grad_query.nbytes()}, {8, grad_key.nbytes()}, {9, grad_value.nbytes()}}};
    const graph::Call call = backward_call(pointers, written);
    if (plan == nullptr) plan = graph::get_plan(call, exact);
    graph::execute(call, *plan);
  }
  if (scale.query_sign != 1) grad_query.mul_(scale.query_sign);
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("sdpa", cudnn_ops::sdpa_cuda);
  m.impl("sdpa_with_lse", cudnn_ops::sdpa_with_lse_cuda);
  m.impl("_sdpa_backward", cudnn_ops::sdpa_backward_cuda);
}
