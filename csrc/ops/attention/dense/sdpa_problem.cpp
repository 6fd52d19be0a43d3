#include "ops/attention/dense/sdpa_problem.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {

namespace {

// cuDNN's backward reads 128 keys at a time and hides what lies behind the last key by 64, so of 64
// modulo 128 keys a query sees 64 more, whose scores are 0: exp(0 - lse) overflows below -88.7, and
// the gradient of the query is NaN (9.19, measured on an H200; cudnn-frontend 628 tells why). Told
// the lengths, or where the right bound hides them, it is right.
bool sees_behind_keys(const Sdpa& args, const Band& band) {
  const int64_t length = args.query.size(2), length_kv = args.key.size(2);
  if (length_kv % 128 != 64) return false;
  const int64_t shift = band.bottom_right ? length_kv - length : 0;
  return band.right == kUnbounded || band.right >= length_kv - shift - (length - 1);
}

}  // namespace

bool needs_lengths(const Sdpa& args, const Band& band, bool backward) {
  // cuDNN bounds the left side of more queries than keys only where it is told the lengths.
  return is_padded(args) || (band.left != kUnbounded && args.query.size(2) > args.key.size(2)) ||
         (backward && sees_behind_keys(args, band));
}

bool has_slopes_in_bias(const Sdpa& args, const Band& band, bool backward) {
  return args.alibi_slopes && band.bottom_right && needs_lengths(args, band, backward);
}

namespace {

at::Tensor slopes_as_bias(const Sdpa& args) {
  const auto options = args.query.options().dtype(at::kFloat);
  const auto length = [&](const OptionalTensor& lengths, const at::Tensor& like) {
    return lengths ? lengths->to(at::kFloat).view({-1, 1, 1, 1})
                   : at::full({1, 1, 1, 1}, static_cast<double>(like.size(2)), options);
  };
  const at::Tensor shift =
      length(args.seq_lens_kv, args.key).sub(length(args.seq_lens_q, args.query));
  const at::Tensor row = at::arange(args.query.size(2), options).unsqueeze(-1);
  const at::Tensor distance = at::arange(args.key.size(2), options).sub(row.add(shift)).abs_();
  return distance.mul(args.alibi_slopes->to(at::kFloat).neg().view({-1, 1, 1}));
}

}  // namespace

at::Tensor bias_of(const Sdpa& args, const Band& band, bool backward) {
  const bool has_slopes = has_slopes_in_bias(args, band, backward);
  if (!args.attn_mask) return has_slopes ? slopes_as_bias(args) : at::Tensor();
  at::Tensor bias = *args.attn_mask;
  while (bias.dim() < 4) bias = bias.unsqueeze(0);
  const auto dtype = args.query.scalar_type();
  if (bias.scalar_type() == at::kBool) {
    const at::Tensor hidden = bias.logical_not();
    bias = at::zeros(bias.sizes(), bias.options().dtype(dtype))
               .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  } else if (bias.scalar_type() != dtype && bias.scalar_type() != at::kFloat) {
    bias = bias.to(at::kFloat);  // exact, where the query's 16 bits are the other kind
  }
  if (has_slopes) bias = slopes_as_bias(args).add_(bias);
  const int64_t length_kv = args.key.size(2);
  if (bias.size(3) != length_kv) bias = bias.expand({-1, -1, -1, length_kv});
  if (!graph::is_addressable(bias, graph::Strides::kAny)) {
    bias = bias.clone(at::MemoryFormat::Contiguous);
  }
  return bias.expand({-1, -1, args.query.size(2), -1});
}

bool needs_two_queries(const Sdpa& args, const Band& band, bool backward) {
  return args.query.size(2) == 1 &&
         (backward || args.sinks || args.dropout_p > 0 ||
          (args.alibi_slopes && !has_slopes_in_bias(args, band, backward)));
}

std::pair<int64_t, int64_t> place_of_second_query(const Sdpa& args, const Band& band) {
  const bool is_last = band.bottom_right && !args.seq_lens_q && !args.seq_lens_kv;
  return is_last ? std::pair<int64_t, int64_t>{1, 0} : std::pair<int64_t, int64_t>{0, 1};
}

Band band_of_two_queries(const Bands& bands) {
  const bool hides = bands.general.left != kUnbounded || bands.general.bottom_right;
  return hides ? bands.exact : bands.general;
}

SdpaMask mask_of(const Sdpa& args, const Band& band, const at::Tensor& bias, bool backward) {
  const bool has_alibi = args.alibi_slopes && !has_slopes_in_bias(args, band, backward);
  SdpaMask mask = mask_of_options(args, band, has_alibi, backward);
  if (needs_lengths(args, band, backward)) mask.sequences = Sequences::kLengths;
  if (bias.defined()) mask.bias = graph::TensorDesc::of(bias);
  return mask;
}

int64_t queries_to_align(const Sdpa& args, const VisibleBand& visible) {
  if (visible.bands.exact.right == kUnbounded) return 0;
  const int64_t before = visible.bands.exact.right + visible.shift();
  // A slope's distances would move with the diagonal, unless it was the causal one.
  const bool moves_slopes = args.alibi_slopes && visible.bands.exact.right != 0;
  if (before <= 0 || args.attn_mask || args.dropout_p > 0 || moves_slopes) return 0;
  const int64_t left = left_when_aligned(visible, before);
  const int64_t width =
      left == kUnbounded ? visible.columns / 2 : std::min(visible.columns / 2, left + 1);
  return 10 * (visible.rows + before) * width < 8 * visible.rows * visible.columns ? before : 0;
}

int64_t left_when_aligned(const VisibleBand& visible, int64_t before) {
  const int64_t left = visible.bands.exact.left;
  return left == kUnbounded ? left : left - visible.shift() + before;
}

}  // namespace cudnn_ops
