// "Which plan would this attention need?": the key that a call would make, from the sizes,
// strides and dtypes of its tensors alone. What asks, warms up or tunes starts from here.

#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/polymorphic.h"
#include "ops/attention/dense/sdpa_regular.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <array>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;
using Answer = std::tuple<std::vector<int64_t>, std::string>;

TensorDesc dense_desc(c10::IntArrayRef sizes, const at::Tensor& like) {
  return {like.scalar_type(), sizes, dense_strides_like(sizes, like)};
}

// What the kernel would hand to cuDNN: the tensor as it lies, or a dense copy of it.
TensorDesc desc_of(const at::Tensor& tensor) {
  return graph::is_addressable(tensor) ? TensorDesc::of(tensor)
                                       : dense_desc(tensor.sizes(), tensor);
}

template <class Params>
Answer answer(const Params& params, const Band& general, bool polymorphic) {
  if (!polymorphic) return {graph::PlanKey::of(params, 0).words().vec(), ""};
  if (const auto declared = ragged(params, general)) {
    return {graph::PlanKey::of(*declared, 0).words().vec(), ""};
  }
  return {
      std::vector<int64_t>(),
      "there is no polymorphic plan with a mask or with dropout, nor one that would be declared "
      "for over 2^31 elements or 65535 sequences"};
}

Answer forward_key(const Attention& args, const Bands& bands, bool with_lse, bool polymorphic) {
  const auto& q = args.query;
  return answer(
      SdpaForwardParams{desc_of(q), desc_of(args.key), desc_of(args.value),
                        dense_desc({q.size(0), q.size(1), q.size(2), args.value.size(3)}, q),
                        mask_of(args, bands.exact, bias_of(args, bands.exact, /*backward=*/false),
                                /*backward=*/false),
                        with_lse},
      bands.general, polymorphic);
}

Answer backward_key(const Attention& args, const Bands& bands, bool grad_mask, bool polymorphic) {
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
  if (grad_mask) {
    params.grad_bias = TensorDesc::of(at::empty(bias.sizes(), bias.options().dtype(q.dtype())));
  }
  params.is_deterministic =
      args.deterministic.value_or(at::globalContext().deterministicAlgorithms());
  return answer(params, bands.general, polymorphic);
}

// As the kernels come to what cuDNN is given: what is visible, and for the backward aligned.
Answer plan_key(const Attention& args, bool with_lse, bool backward, bool grad_mask,
                bool polymorphic) {
  const Band band = Band::of(args.is_causal, args.window_size, args.bottom_right);
  Bands bands{band, band};
  if (!is_padded(args)) {
    const auto visible =
        VisibleBand::of(band, args.query.size(2), args.key.size(2), args.alibi_slopes.has_value());
    if (visible.rows == 0 || visible.columns == 0) {
      return {std::vector<int64_t>(), "cudnn_ops.sdpa needs no plan where no key is attended to"};
    }
    if (visible.rows < args.query.size(2)) {
      const AttentionPart part(args, Along::kQueries, visible.row, visible.rows);
      return plan_key(part.attention(), with_lse, backward, grad_mask, polymorphic);
    }
    if (visible.columns < args.key.size(2)) {
      const AttentionPart part(args, Along::kKeys, visible.column, visible.columns);
      return plan_key(part.attention(), with_lse, backward, grad_mask, polymorphic);
    }
    if (const int64_t before = backward ? queries_to_align(args, visible) : 0; before > 0) {
      const AttentionWithMoreQueries more(args, before, 0,
                                          {left_when_aligned(visible, before), 0, false});
      return plan_key(more.attention(), with_lse, backward, grad_mask, polymorphic);
    }
    bands = visible.bands;
  }
  if (needs_two_queries(args, bands.exact, backward)) {
    const auto [before, behind] = place_of_second_query(args, bands.exact);
    const AttentionWithMoreQueries more(args, before, behind, band_of_two_queries(bands));
    return plan_key(more.attention(), with_lse, backward, grad_mask, polymorphic);
  }
  return backward ? backward_key(args, bands, grad_mask, polymorphic)
                  : forward_key(args, bands, with_lse, polymorphic);
}

Answer plan_key_op(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                   c10::IntArrayRef window_size, bool bottom_right, double softcap,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                   const OptionalTensor& seq_lens_q, const OptionalTensor& seq_lens_kv,
                   std::optional<bool> deterministic, bool with_lse, bool backward, bool grad_mask,
                   bool polymorphic) {
  if (query.scalar_type() != at::kHalf && query.scalar_type() != at::kBFloat16) {
    return {std::vector<int64_t>(), "cudnn_ops.sdpa runs float16 and bfloat16 on a GPU"};
  }
  const OptionalTensor none;
  const Attention args{query,         key,          value, attn_mask,   dropout_p,
                       is_causal,     std::nullopt, true,  window_size, bottom_right,
                       softcap,       alibi_slopes, sinks, seq_lens_q,  seq_lens_kv,
                       deterministic, none};
  if (!is_regular(args)) {
    const RegularAttention regular(args);
    const Attention given = regular.attention();
    check_sdpa_arguments(given);
    return plan_key(given, with_lse, backward, grad_mask, polymorphic);
  }
  check_sdpa_arguments(args);
  return plan_key(args, with_lse, backward, grad_mask, polymorphic);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  // Tensors on the meta device: only their sizes, strides and dtypes are read. Without a plan,
  // `words` is empty and `refusal` says why.
  m.def(
      "_sdpa_plan_key(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "float dropout_p=0.0, bool is_causal=False, *, int[2] window_size=[-1, -1], "
      "bool bottom_right=False, float softcap=0.0, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor? seq_lens_q=None, Tensor? seq_lens_kv=None, "
      "bool? deterministic=None, bool with_lse=False, bool backward=False, "
      "bool grad_mask=False, bool polymorphic=False) -> (int[] words, str refusal)",
      cudnn_ops::plan_key_op);
}
