// Scaled dot-product attention on CUDA, backward: bring the problem into a form that cuDNN
// computes, and quickly, then make the key and run the plan.

#include "ops/attention/check.h"
#include "ops/attention/dense/sdpa_cuda.h"
#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/sinks.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Gradients compute(const SdpaBackward& given);

// A gradient for every element; `grad_mask` has the shape of attn_mask and may be undefined.
struct Results {
  at::Tensor grad_query, grad_key, grad_value, grad_mask;

  Results(const Sdpa& args, bool with_mask)
      : grad_query(empty_like_order(args.query.sizes(), args.query)),
        grad_key(empty_like_order(args.key.sizes(), args.key)),
        grad_value(empty_like_order(args.value.sizes(), args.value)) {
    if (with_mask) grad_mask = at::zeros_like(*args.attn_mask, at::MemoryFormat::Contiguous);
  }
  void zero() const {
    for (const auto* tensor : {&grad_query, &grad_key, &grad_value}) tensor->zero_();
  }
  // What a part gives, put in its place. Parts may share elements of the mask.
  void put(const SdpaPart& part, const Gradients& grads) const {
    part.of_query(grad_query).copy_(std::get<0>(grads));
    part.of_key(grad_key).copy_(std::get<1>(grads));
    part.of_key(grad_value).copy_(std::get<2>(grads));
    if (grad_mask.defined()) part.of_mask(grad_mask).add_(std::get<3>(grads));
  }
  Gradients all() const {
    return {grad_query, grad_key, grad_value, grad_mask, at::Tensor()};
  }
};

SdpaBackward part_of(const SdpaPart& part, const SdpaBackward& given) {
  return {part.args(), part.of_query(given.grad_out), part.of_query(given.out),
          part.of_query(given.lse), given.grad_mask};
}

// The gradients where only a part of the queries or keys sees anything.
Gradients compute_visible(const SdpaBackward& given, Along along, int64_t start, int64_t size) {
  const Results results(given.args, given.grad_mask);
  results.zero();
  if (size == 0) return results.all();
  const SdpaPart part(given.args, along, start, size);
  results.put(part, compute(part_of(part, given)));
  return results.all();
}

// How to cut a problem that is too large for one call of cuDNN's backward.
struct Cut {
  Along along = Along::kBatch;
  int64_t count = 1;
};

Cut cut_for_backward(const Sdpa& args, const at::Tensor& out) {
  const auto parts = [](int64_t size, int64_t limit) { return (size + limit - 1) / limit; };
  const int64_t batch = args.query.size(0), heads = args.query.size(1);
  if (batch > kMaxBackwardRows) return {Along::kBatch, parts(batch, kMaxBackwardRows)};
  if (heads > kMaxBackwardRows) return {Along::kKeyHeads, parts(heads, kMaxBackwardRows)};
  const int64_t largest =
      std::max({args.query.numel(), args.key.numel(), args.value.numel(), out.numel()});
  return {batch > 1 ? Along::kBatch : Along::kKeyHeads, parts(largest, kMaxBackwardElements)};
}

// The gradients part by part; a part that is still too large is cut again.
Gradients compute_in_parts(const Cut& cut, const SdpaBackward& given) {
  const Sdpa& args = given.args;
  const int64_t units = args.key.size(cut.along == Along::kBatch ? 0 : 1);
  TORCH_CHECK_NOT_IMPLEMENTED(units > 1, "cudnn_ops.sdpa backward: one key head with its queries, ",
                              args.query.sizes(), " and ", args.key.sizes(),
                              ", is more than cuDNN supports: 2^31 elements and ", kMaxBackwardRows,
                              " query heads");
  TORCH_CHECK_NOT_IMPLEMENTED(
      args.dropout_p == 0, "cudnn_ops.sdpa backward: with dropout, more than 2^31 elements, ",
      kMaxBackwardRows, " batch entries or heads are more than cuDNN supports; got ",
      args.query.sizes(), " and ", args.key.sizes());
  const Results results(args, given.grad_mask);
  const int64_t step = (units + cut.count - 1) / cut.count;
  for (int64_t start = 0; start < units; start += step) {
    const SdpaPart part(args, cut.along, start, std::min(step, units - start));
    results.put(part, compute(part_of(part, given)));
  }
  return results.all();
}

// The problem with queries added that have no weight.
Gradients compute_with_more_queries(const SdpaBackward& given, int64_t before, int64_t behind,
                                    const Band& band) {
  const at::Tensor& query = given.args.query;
  const SdpaWithMoreQueries more(given.args, before, behind, band);
  // A probability is exp(score - lse): none.
  const at::Tensor lse = at::constant_pad_nd(given.lse, {before, behind}, kInfinity);
  auto grads = compute(
      {more.args(), more.longer(given.grad_out), more.longer(given.out), lse, given.grad_mask});
  const at::Tensor grad_query = empty_like_order(query.sizes(), query);
  grad_query.copy_(more.own(std::get<0>(grads)));
  std::get<0>(grads) = grad_query;
  return grads;
}

// The gradient of the scores, summed to the shape of the mask.
at::Tensor to_mask(const at::Tensor& grad_bias, const at::Tensor& mask) {
  at::Tensor grad = grad_bias;
  c10::SmallVector<int64_t, 4> summed;
  for (int64_t dim = 0; dim < 4; ++dim) {
    const int64_t own = dim - 4 + mask.dim();
    if ((own < 0 || mask.size(own) == 1) && grad.size(dim) > 1) summed.push_back(dim);
  }
  if (!summed.empty()) grad = grad.sum(summed, /*keepdim=*/true, at::kFloat);
  return grad.reshape(mask.sizes()).to(mask.scalar_type());
}

Gradients run_backward(const SdpaBackward& given, const Bands& bands) {
  const Sdpa& args = given.args;
  const Results results(args, /*with_mask=*/false);
  const Scale scale(args.scale, args.query);
  const auto usable = [](const at::Tensor& tensor, const at::Tensor& like) {
    return addressable(tensor, like, kMaxBackwardElements);
  };
  SdpaBackwardTensors tensors{usable(scale.applied_to(args.query), args.query),
                              usable(args.key, args.key),
                              usable(args.value, args.value),
                              usable(given.out, given.out),
                              given.lse.contiguous(),
                              usable(given.grad_out, given.out),
                              mask_tensors_of(args, bands.exact, /*backward=*/true),
                              scale.value,
                              static_cast<float>(args.softcap),
                              results.grad_query,
                              results.grad_key,
                              results.grad_value,
                              at::Tensor()};
  SdpaBackwardParams params{TensorDesc::of(tensors.query),
                            TensorDesc::of(tensors.key),
                            TensorDesc::of(tensors.value),
                            TensorDesc::of(tensors.out),
                            TensorDesc::of(tensors.grad_out),
                            TensorDesc::of(tensors.grad_query),
                            TensorDesc::of(tensors.grad_key),
                            TensorDesc::of(tensors.grad_value),
                            TensorDesc(),
                            mask_of(args, bands.exact, tensors.mask.bias, /*backward=*/true)};
  params.is_deterministic = is_deterministic(args);
  if (given.grad_mask) {
    // In the query's type, whatever the mask's: cuDNN 9.19 writes no other.
    tensors.grad_bias = at::detail::empty_cuda(tensors.mask.bias.sizes(), args.query.scalar_type(),
                                               args.query.device(), std::nullopt);
    params.grad_bias = TensorDesc::of(tensors.grad_bias);
  }
  const auto exact = graph::PlanKey::of(params, args.query.get_device());
  auto plan = graph::ready_plan(exact);
  if (plan != nullptr || !run_polymorphic(params, exact, tensors, bands.general)) {
    if (is_padded(args)) results.zero();  // cuDNN leaves alone what is beyond the lengths
    const SdpaPointers pointers(params, tensors);
    const graph::Call call = call_of(kSdpaBackwardCall, pointers);
    if (plan == nullptr) plan = graph::get_plan(call, exact);
    graph::execute(call, *plan);
  }
  if (scale.query_sign != 1) results.grad_query.mul_(scale.query_sign);
  auto grads = results.all();
  if (given.grad_mask) std::get<3>(grads) = to_mask(tensors.grad_bias, *args.attn_mask);
  return grads;
}

Gradients compute(const SdpaBackward& given) {
  const Sdpa& args = given.args;
  const int64_t length = args.query.size(2), length_kv = args.key.size(2);
  if (given.out.numel() == 0 || length_kv == 0) {
    const Results results(args, given.grad_mask);
    results.zero();
    return results.all();
  }
  const Band band = Band::of(args);
  VisibleBand visible{{band, band}, 0, length, 0, length_kv};
  if (!is_padded(args)) {
    visible = VisibleBand::of(band, length, length_kv, args.alibi_slopes.has_value());
    if (visible.rows < length) {
      return compute_visible(given, Along::kQueries, visible.row, visible.rows);
    }
    if (visible.columns < length_kv) {
      return compute_visible(given, Along::kKeys, visible.column, visible.columns);
    }
  }
  if (const Cut cut = cut_for_backward(args, given.out); cut.count > 1) {
    return compute_in_parts(cut, given);
  }
  if (needs_two_queries(args, visible.bands.exact, /*backward=*/true)) {
    const auto [before, behind] = place_of_second_query(args, visible.bands.exact);
    return compute_with_more_queries(given, before, behind, band_of_two_queries(visible.bands));
  }
  if (!is_padded(args)) {
    if (const int64_t before = queries_to_align(args, visible); before > 0) {
      return compute_with_more_queries(given, before, 0,
                                       {left_when_aligned(visible, before), 0, false});
    }
  }
  return run_backward(given, visible.bands);
}

Gradients sdpa_backward_cuda(const SdpaBackward& given) {
  const Sdpa& args = given.args;
  check_sdpa_backward(given);
  const c10::cuda::CUDAGuard device_guard(args.query.device());
  auto grads = compute(given);
  const auto nothing = [&] {
    return at::detail::empty_cuda({0}, args.query.scalar_type(), args.query.device(), std::nullopt);
  };
  if (!given.grad_mask) std::get<3>(grads) = nothing();
  if (args.sinks) {
    const at::Tensor delta = given.grad_out.to(at::kFloat).mul(given.out).sum(-1);
    std::get<4>(grads) = gradient_of_sinks(*args.sinks, delta, given.lse);
  } else {
    std::get<4>(grads) = nothing();
  }
  return grads;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_sdpa_backward", cudnn_ops::kernel<cudnn_ops::sdpa_backward_cuda>);
}
