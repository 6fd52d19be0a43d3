// "Which plan would this attention need?": the key that a call would make, from the sizes,
// strides and dtypes of its tensors alone. What asks, warms up or tunes starts from here.

#include "ops/attention/dense/sdpa_plan_key.h"

#include "ops/attention/check.h"
#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/dense/sdpa_regular.h"
#include "ops/attention/layout.h"
#include "ops/attention/polymorphic.h"

#include <ATen/ops/empty.h>

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
PlanAnswer answer(const Params& params, const Band& general, bool is_polymorphic) {
  if (!is_polymorphic) return {graph::PlanKey::of(params, 0).words().vec(), ""};
  if (const auto declared = polymorphic(params, general)) {
    return {graph::PlanKey::of(*declared, 0).words().vec(), ""};
  }
  return {
      std::vector<int64_t>(),
      "there is no polymorphic plan with a mask or with dropout, nor one that would be declared "
      "for over 2^31 elements or 65535 sequences"};
}

PlanAnswer forward_key(const SdpaPlanRequest& request, const Bands& bands) {
  const Sdpa& args = request.args;
  const auto& q = args.query;
  return answer(
      SdpaForwardParams{desc_of(q), desc_of(args.key), desc_of(args.value),
                        dense_desc({q.size(0), q.size(1), q.size(2), args.value.size(3)}, q),
                        mask_of(args, bands.exact, bias_of(args, bands.exact, /*backward=*/false),
                                /*backward=*/false),
                        request.with_lse},
      bands.general, request.polymorphic);
}

PlanAnswer backward_key(const SdpaPlanRequest& request, const Bands& bands) {
  const Sdpa& args = request.args;
  const auto &q = args.query, &k = args.key, &v = args.value;
  const auto out = dense_desc({q.size(0), q.size(1), q.size(2), v.size(3)}, q);
  const at::Tensor bias = bias_of(args, bands.exact, /*backward=*/true);
  SdpaBackwardParams params{desc_of(q),
                            desc_of(k),
                            desc_of(v),
                            out,
                            /*grad_out=*/out,
                            dense_desc(q.sizes(), q),
                            dense_desc(k.sizes(), k),
                            dense_desc(v.sizes(), v),
                            TensorDesc(),
                            mask_of(args, bands.exact, bias, /*backward=*/true)};
  if (request.grad_mask) {
    params.grad_bias = TensorDesc::of(at::empty(bias.sizes(), bias.options().dtype(q.dtype())));
  }
  params.is_deterministic = is_deterministic(args);
  return answer(params, bands.general, request.polymorphic);
}

// As the kernels come to what cuDNN is given: what is visible, and for the backward aligned.
PlanAnswer plan_key(const SdpaPlanRequest& request) {
  const Sdpa& args = request.args;
  const bool backward = request.backward;
  const auto with = [&](const Sdpa& other) {
    SdpaPlanRequest changed = request;
    changed.args = other;
    return plan_key(changed);
  };
  const Band band = Band::of(args);
  Bands bands{band, band};
  if (!is_padded(args)) {
    const auto visible =
        VisibleBand::of(band, args.query.size(2), args.key.size(2), args.alibi_slopes.has_value());
    if (visible.rows == 0 || visible.columns == 0) {
      return {std::vector<int64_t>(), "cudnn_ops.sdpa needs no plan where no key is attended to"};
    }
    if (visible.rows < args.query.size(2)) {
      return with(SdpaPart(args, Along::kQueries, visible.row, visible.rows).args());
    }
    if (visible.columns < args.key.size(2)) {
      return with(SdpaPart(args, Along::kKeys, visible.column, visible.columns).args());
    }
    if (const int64_t before = backward ? queries_to_align(args, visible) : 0; before > 0) {
      const Band aligned{left_when_aligned(visible, before), 0, false};
      return with(SdpaWithMoreQueries(args, before, 0, aligned).args());
    }
    bands = visible.bands;
  }
  if (needs_two_queries(args, bands.exact, backward)) {
    const auto [before, behind] = place_of_second_query(args, bands.exact);
    return with(SdpaWithMoreQueries(args, before, behind, band_of_two_queries(bands)).args());
  }
  return backward ? backward_key(request, bands) : forward_key(request, bands);
}

}  // namespace

PlanAnswer sdpa_plan_key(const SdpaPlanRequest& request) {
  const Sdpa& args = request.args;
  const auto dtype = args.query.scalar_type();
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    return {std::vector<int64_t>(), "cudnn_ops.sdpa runs float16 and bfloat16 on a GPU"};
  }
  SdpaPlanRequest regular = request;
  if (!is_regular(args)) regular.args = RegularSdpa(args).args();
  check_sdpa_arguments(regular.args);
  return plan_key(regular);
}

}  // namespace cudnn_ops
