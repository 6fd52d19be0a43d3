// Scaled dot-product attention on CUDA, forward: allocate, make the key, run the plan.

#include "ops/attention/plan_tensors_cuda.h"
#include "ops/attention/dense/sdpa_call.h"
#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

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
  value = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1)))));
  // The GPU takes what is smaller than the smallest normal number for zero.
  const bool is_zero = std::abs(value) < std::numeric_limits<float>::min();
  query_sign = is_zero ? 0 : value > 0 ? 1 : -1;
  value = is_zero ? 1.0F : std::abs(value);
}

at::Tensor Scale::applied_to(const at::Tensor& query) const {
  return query_sign == 1 ? query : query.mul(query_sign);
}

namespace {

at::Tensor empty_lse(const at::Tensor& query) {
  return at::detail::empty_cuda(query.sizes().slice(0, 3), at::kFloat, query.device(),
                                std::nullopt);
}

// Attention to no key: the log-sum-exp is that of the sink alone, if there is one.
void fill_with_nothing(const Attention& args, const at::Tensor& out, const at::Tensor& lse) {
  out.zero_();
  if (!lse.defined()) return;
  if (args.sinks) {
    lse.copy_(args.sinks->view({1, -1, 1}));
  } else {
    lse.fill_(-kInfinity);
  }
}

void run_forward(const Attention& args, const Bands& bands, const at::Tensor& out,
                 const at::Tensor& lse) {
  const Scale scale(args.scale, args.query);
  SdpaForwardTensors tensors{addressable(scale.applied_to(args.query), args.query),
                             addressable(args.key, args.key),
                             addressable(args.value, args.value),
                             MaskTensors(args, bands.exact, /*backward=*/false),
                             scale.value,
                             static_cast<float>(args.softcap),
                             out,
                             lse};
  const SdpaForwardParams params{TensorDesc::of(tensors.query),
                                 TensorDesc::of(tensors.key),
                                 TensorDesc::of(tensors.value),
                                 TensorDesc::of(out),
                                 mask_of(args, bands.exact, tensors.mask.bias, /*backward=*/false),
                                 lse.defined()};
  const auto exact = graph::PlanKey::of(params, args.query.get_device());
  auto plan = graph::ready_plan(exact);
  if (plan == nullptr && run_ragged(params, exact, tensors, bands.general)) return;
  if (is_padded(args)) {  // cuDNN leaves alone some of what lies beyond the lengths
    out.zero_();
    if (lse.defined()) lse.fill_(-kInfinity);
  }
  const SdpaPointers pointers(params, tensors);
  const graph::Call call = forward_call(pointers);
  if (plan == nullptr) plan = graph::get_plan(call, exact);
  graph::execute(call, *plan);
}

void run_forward_or_two_queries(const Attention& args, const Bands& bands, const at::Tensor& out,
                                const at::Tensor& lse) {
  if (!needs_two_queries(args, bands.exact, /*backward=*/false)) {
    return run_forward(args, bands, out, lse);
  }
  const auto [before, behind] = place_of_second_query(args, bands.exact);
  const AttentionWithMoreQueries more(args, before, behind, bands.exact);
  const Attention two = more.attention();
  const at::Tensor out_of_two =
      empty_like_order({two.query.size(0), two.query.size(1), 2, out.size(3)}, args.query);
  const at::Tensor lse_of_two = lse.defined() ? empty_lse(two.query) : lse;
  run_forward(two, {bands.exact, band_of_two_queries(bands)}, out_of_two, lse_of_two);
  out.copy_(more.own(out_of_two));
  if (lse.defined()) lse.copy_(more.own(lse_of_two));
}

// cuDNN's kernel for a single query computes it also where a sequence has none.
void hide_absent_queries(const Attention& args, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor absent = args.seq_lens_q->eq(0).view({-1, 1, 1});
  out.masked_fill_(absent.unsqueeze(-1), 0.0);
  if (lse.defined()) lse.masked_fill_(absent, -kInfinity);
}

// A query whose sequence has no key has its sink, of which cuDNN says nothing.
void add_sinks_without_keys(const Attention& args, const at::Tensor& lse) {
  at::Tensor where = args.seq_lens_kv->eq(0).view({-1, 1, 1});
  if (args.seq_lens_q) {
    const auto position = at::arange(lse.size(2), args.seq_lens_q->options());
    where = where.logical_and(position.lt(args.seq_lens_q->view({-1, 1, 1})));
  }
  lse.copy_(at::where(where, args.sinks->to(at::kFloat).view({1, -1, 1}), lse));
}

// Writes all of `out`, and of `lse` if that is defined.
void forward_into(const Attention& args, const at::Tensor& out, const at::Tensor& lse) {
  if (args.key.size(2) == 0) return fill_with_nothing(args, out, lse);
  const Band band = Band::of(args.is_causal, args.window_size, args.bottom_right);
  if (is_padded(args)) {
    run_forward_or_two_queries(args, {band, band}, out, lse);
    if (args.seq_lens_q && args.query.size(2) == 1) hide_absent_queries(args, out, lse);
    if (args.sinks && args.seq_lens_kv && lse.defined()) add_sinks_without_keys(args, lse);
    return;
  }
  const auto visible =
      VisibleBand::of(band, args.query.size(2), args.key.size(2), args.alibi_slopes.has_value());
  if (visible.rows == 0 || visible.columns == 0) return fill_with_nothing(args, out, lse);
  if (visible.rows < args.query.size(2)) {
    fill_with_nothing(args, out, lse);
    const AttentionPart part(args, Along::kQueries, visible.row, visible.rows);
    const Attention rows = part.attention();
    const at::Tensor out_rows =
        empty_like_order({rows.query.size(0), rows.query.size(1), visible.rows, out.size(3)}, out);
    const at::Tensor lse_rows = lse.defined() ? empty_lse(rows.query) : lse;
    forward_into(rows, out_rows, lse_rows);
    part.of_query(out).copy_(out_rows);
    if (lse.defined()) part.of_query(lse).copy_(lse_rows);
    return;
  }
  if (visible.columns < args.key.size(2)) {
    const AttentionPart part(args, Along::kKeys, visible.column, visible.columns);
    return forward_into(part.attention(), out, lse);
  }
  run_forward_or_two_queries(args, visible.bands, out, lse);
}

OutAndLse forward(const Attention& args, bool with_lse) {
  check_sdpa(args);
  const auto& query = args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  graph::require_sm80("cudnn_ops.sdpa", query.get_device());
  const at::Tensor out =
      empty_like_order({query.size(0), query.size(1), query.size(2), args.value.size(3)}, query);
  at::Tensor lse;
  if (with_lse) lse = empty_lse(query);
  if (out.numel() != 0) forward_into(args, out, lse);
  return {out, lse};
}

// What is not regular comes here only where autograd is left out, as in inference mode.
at::Tensor sdpa_cuda(const Attention& args) {
  if (!is_regular(args)) return sdpa_as_regular(args);
  return std::get<0>(forward(args, /*with_lse=*/false));
}

OutAndLse sdpa_with_lse_cuda(const Attention& args) {
  if (!is_regular(args)) return sdpa_with_lse_as_regular(args);
  return forward(args, /*with_lse=*/true);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("sdpa", attention_kernel<at::Tensor, sdpa_cuda>);
  m.impl("sdpa_with_lse", attention_kernel<OutAndLse, sdpa_with_lse_cuda>);
}
