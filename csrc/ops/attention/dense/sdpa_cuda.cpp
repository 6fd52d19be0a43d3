// Scaled dot-product attention on CUDA, forward: allocate, make the key, run the plan.

#include "ops/attention/dense/sdpa_cuda.h"

#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor empty_lse(const at::Tensor& query) {
  return at::detail::empty_cuda(query.sizes().slice(0, 3), at::kFloat, query.device(),
                                std::nullopt);
}

at::Tensor lengths_of(const OptionalTensor& lengths, const at::Tensor& like) {
  if (lengths) return lengths->to(at::kInt).contiguous();
  return at::full({like.size(0)}, like.size(2), like.options().dtype(at::kInt));
}

}  // namespace

MaskTensors mask_tensors_of(const Sdpa& args, const Band& band, bool backward) {
  MaskTensors tensors =
      MaskTensors::of(args, args.query, args.query.sym_size(2), args.key.sym_size(2), !backward);
  tensors.bias = bias_of(args, band, backward);
  if (has_slopes_in_bias(args, band, backward)) tensors.alibi_slopes = at::Tensor();
  if (needs_lengths(args, band, backward)) {
    tensors.lengths = lengths_of(args.seq_lens_q, args.query);
    const bool are_alike = !is_padded(args) && args.query.size(2) == args.key.size(2);
    tensors.lengths_kv = are_alike ? tensors.lengths : lengths_of(args.seq_lens_kv, args.key);
  }
  return tensors;
}

namespace {

void run_forward(const Sdpa& args, const Bands& bands, const at::Tensor& out,
                 const at::Tensor& lse) {
  const Scale scale(args.scale, args.query);
  SdpaForwardTensors tensors{addressable(scale.applied_to(args.query), args.query),
                             addressable(args.key, args.key),
                             addressable(args.value, args.value),
                             mask_tensors_of(args, bands.exact, /*backward=*/false),
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
  if (plan == nullptr && run_polymorphic(params, exact, tensors, bands.general)) return;
  if (is_padded(args)) {  // cuDNN leaves alone some of what lies beyond the lengths
    out.zero_();
    if (lse.defined()) lse.fill_(-kInfinity);
  }
  const SdpaPointers pointers(params, tensors);
  const graph::Call call = call_of(kSdpaCall, pointers);
  if (plan == nullptr) plan = graph::get_plan(call, exact);
  graph::execute(call, *plan);
}

void run_forward_or_two_queries(const Sdpa& args, const Bands& bands, const at::Tensor& out,
                                const at::Tensor& lse) {
  if (!needs_two_queries(args, bands.exact, /*backward=*/false)) {
    return run_forward(args, bands, out, lse);
  }
  const auto [before, behind] = place_of_second_query(args, bands.exact);
  const SdpaWithMoreQueries more(args, before, behind, bands.exact);
  const Sdpa& two = more.args();
  const at::Tensor out_of_two =
      empty_like_order({two.query.size(0), two.query.size(1), 2, out.size(3)}, args.query);
  const at::Tensor lse_of_two = lse.defined() ? empty_lse(two.query) : lse;
  run_forward(two, {bands.exact, band_of_two_queries(bands)}, out_of_two, lse_of_two);
  out.copy_(more.own(out_of_two));
  if (lse.defined()) lse.copy_(more.own(lse_of_two));
}

// cuDNN's kernel for a single query computes it also where a sequence has none.
void hide_absent_queries(const Sdpa& args, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor absent = args.seq_lens_q->eq(0).view({-1, 1, 1});
  out.masked_fill_(absent.unsqueeze(-1), 0.0);
  if (lse.defined()) lse.masked_fill_(absent, -kInfinity);
}

// A query whose sequence has no key has its sink, of which cuDNN says nothing.
void add_sinks_without_keys(const Sdpa& args, const at::Tensor& lse) {
  at::Tensor where = args.seq_lens_kv->eq(0).view({-1, 1, 1});
  if (args.seq_lens_q) {
    const auto position = at::arange(lse.size(2), args.seq_lens_q->options());
    where = where.logical_and(position.lt(args.seq_lens_q->view({-1, 1, 1})));
  }
  lse.copy_(at::where(where, args.sinks->to(at::kFloat).view({1, -1, 1}), lse));
}

// Writes all of `out`, and of `lse` if that is defined.
void forward_into(const Sdpa& args, const at::Tensor& out, const at::Tensor& lse) {
  if (args.key.size(2) == 0) return fill_with_nothing(out, lse, args.sinks);
  const Band band = Band::of(args);
  if (is_padded(args)) {
    run_forward_or_two_queries(args, {band, band}, out, lse);
    if (args.seq_lens_q && args.query.size(2) == 1) hide_absent_queries(args, out, lse);
    if (args.sinks && args.seq_lens_kv && lse.defined()) add_sinks_without_keys(args, lse);
    return;
  }
  const auto visible =
      VisibleBand::of(band, args.query.size(2), args.key.size(2), args.alibi_slopes.has_value());
  if (visible.rows == 0 || visible.columns == 0) return fill_with_nothing(out, lse, args.sinks);
  if (visible.rows < args.query.size(2)) {
    fill_with_nothing(out, lse, args.sinks);
    const SdpaPart part(args, Along::kQueries, visible.row, visible.rows);
    const Sdpa& rows = part.args();
    const at::Tensor out_rows =
        empty_like_order({rows.query.size(0), rows.query.size(1), visible.rows, out.size(3)}, out);
    const at::Tensor lse_rows = lse.defined() ? empty_lse(rows.query) : lse;
    forward_into(rows, out_rows, lse_rows);
    part.of_query(out).copy_(out_rows);
    if (lse.defined()) part.of_query(lse).copy_(lse_rows);
    return;
  }
  if (visible.columns < args.key.size(2)) {
    const SdpaPart part(args, Along::kKeys, visible.column, visible.columns);
    return forward_into(part.args(), out, lse);
  }
  run_forward_or_two_queries(args, visible.bands, out, lse);
}

OutAndLse forward(const Sdpa& args, bool with_lse) {
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
at::Tensor sdpa_cuda(const Sdpa& args) {
  if (!is_regular(args)) return sdpa_as_regular(args);
  return std::get<0>(forward(args, /*with_lse=*/false));
}

OutAndLse sdpa_with_lse_cuda(const Sdpa& args) {
  if (!is_regular(args)) return sdpa_with_lse_as_regular(args);
  return forward(args, /*with_lse=*/true);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  using namespace cudnn_ops;
  m.impl("sdpa", kernel<sdpa_cuda>);
  m.impl("sdpa_with_lse", kernel<sdpa_with_lse_cuda>);
}
