#include "ops/attention/band.h"

#include <algorithm>
#include <cstring>

namespace cudnn_ops {
namespace {

// Longer than any sequence, and so small that sums with lengths stay in cuDNN's 32 bits.
constexpr int64_t kNoBound = int64_t{1} << 30;

int64_t bound(int64_t keys) {
  return keys < kNoBound ? keys : kUnbounded;
}

}  // namespace

Band Band::of(const AttentionOptions& options) {
  return {bound(options.window_size[0]), options.is_causal ? 0 : bound(options.window_size[1]),
          options.bottom_right};
}

SdpaMask mask_of_options(const AttentionOptions& options, const Band& band, bool has_alibi,
                         bool backward) {
  SdpaMask mask;
  mask.left = band.left;
  mask.right = band.right;
  mask.bottom_right = band.bottom_right && (band.is_bounded() || has_alibi);
  mask.has_softcap = options.softcap > 0;
  mask.has_alibi = has_alibi;
  mask.has_sinks = options.sinks.has_value() && !backward;
  if (options.dropout_p > 0) {
    std::memcpy(&mask.dropout_p, &options.dropout_p, sizeof mask.dropout_p);
  }
  return mask;
}

VisibleBand VisibleBand::of(Band band, int64_t length, int64_t length_kv, bool has_slopes) {
  const bool left = band.left != kUnbounded, right = band.right != kUnbounded;
  const int64_t shift = band.bottom_right ? length_kv - length : 0;
  // Query i sees keys from i + shift - left to i + shift + right, of those that there are.
  const auto clamp = [](int64_t x, int64_t end) { return std::clamp<int64_t>(x, 0, end); };
  const int64_t row = right ? clamp(-shift - band.right, length) : 0;
  const int64_t row_end = left ? clamp(length_kv + band.left - shift, length) : length;
  const int64_t rows = std::max<int64_t>(row_end - row, 0);
  const int64_t column = left ? clamp(row + shift - band.left, length_kv) : 0;
  const int64_t column_end = right ? clamp(row + rows + shift + band.right, length_kv) : length_kv;
  VisibleBand visible{{band, band}, row, rows, column, std::max<int64_t>(column_end - column, 0)};

  // The first row and column that remain keep the diagonal where it was.
  const int64_t rest = shift + row - column;
  auto& [exact, general] = visible.bands;
  if (left && band.left - rest >= visible.rows - 1) exact.left = kUnbounded;
  if (right && band.right + rest >= visible.columns - 1) exact.right = kUnbounded;
  if (rest == 0 || !(exact.is_bounded() || has_slopes)) exact.bottom_right = false;
  // cuDNN does not align more queries than keys to the bottom right. With a bound on the right
  // alone, which is not left of the first key for any query that remains, the top left serves.
  if (exact.bottom_right && rest < 0 && exact.left == kUnbounded && !has_slopes) {
    exact = {kUnbounded, exact.right + rest, false};
  }
  if (rest == 0 || !(general.is_bounded() || has_slopes)) general.bottom_right = false;
  return visible;
}

}  // namespace cudnn_ops
