#include "ops/attention/fp8/sdpa_fp8_problem.h"

#include "ops/attention/dense/sdpa_part.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/layout.h"

#include <ATen/ops/empty_strided.h>

namespace cudnn_ops {
namespace {

// Hopper has no bottom right alignment. Lengths that the host knows need none: the bounds count
// from the first key as well.
Band from_top_left(const Band& band, int64_t shift) {
  if (!band.bottom_right) return band;
  const auto moved = [](int64_t bound, int64_t by) {
    return bound == kUnbounded ? bound : bound + by;
  };
  return {moved(band.left, -shift), moved(band.right, shift), false};
}

}  // namespace

SdpaFp8Part::SdpaFp8Part(const Sdpa& whole)
    : args(whole), band(Band::of(whole)), rows(whole.query.size(2)), columns(whole.key.size(2)) {
  if (is_padded(whole)) return;
  const auto visible = VisibleBand::of(band, rows, whole.key.size(2), /*has_slopes=*/false);
  row = visible.row;
  rows = visible.columns == 0 ? 0 : visible.rows;
  column = visible.column;
  columns = visible.columns;
  args = SdpaPart(args, Along::kQueries, row, rows).args();
  args = SdpaPart(args, Along::kKeys, column, columns).args();
  band = from_top_left(visible.bands.exact, visible.shift());
}

at::Tensor two_queries(const at::Tensor& query) {
  auto sizes = query.sizes().vec();
  sizes[2] = 2;
  const at::Tensor two =
      at::empty_strided(sizes, dense_strides_like(sizes, query), query.options());
  return two.copy_(query.expand(sizes));
}

SdpaMask fp8_mask(const SdpaFp8Part& part, bool backward) {
  SdpaMask mask = mask_of_options(part.args, part.band, /*has_alibi=*/false, backward);
  if (is_padded(part.args)) mask.sequences = Sequences::kLengths;
  return mask;
}

at::ScalarType written_dtype(at::ScalarType out_dtype, int64_t sm_major) {
  constexpr int64_t kBlackwell = 10;
  return is_fp8(out_dtype) || sm_major >= kBlackwell ? out_dtype : at::kFloat8_e4m3fn;
}

SdpaFp8Params sdpa_fp8_params(const SdpaFp8Part& part, const graph::TensorDesc& query,
                              const graph::TensorDesc& key, const graph::TensorDesc& value,
                              const graph::TensorDesc& out, bool with_lse) {
  return {query, key, value, out, fp8_mask(part, /*backward=*/false), with_lse};
}

}  // namespace cudnn_ops
