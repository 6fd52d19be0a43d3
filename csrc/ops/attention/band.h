// Which keys a query attends to by its position alone: the causal mask, windows, and where their
// diagonal lies.
#pragma once

#include "ops/attention/attention.h"
#include "ops/attention/attention_params.h"

#include <cstdint>

namespace cudnn_ops {

struct Band {
  int64_t left = kUnbounded;
  int64_t right = kUnbounded;
  bool bottom_right = false;

  // The band of a call. A bound that no sequence reaches is none.
  static Band of(const AttentionOptions& options);
  bool is_bounded() const {
    return left != kUnbounded || right != kUnbounded;
  }
};

// What a plan bakes in of the options. The backward needs no sinks: they are in the log-sum-exp.
SdpaMask mask_of_options(const AttentionOptions& options, const Band& band, bool has_alibi,
                         bool backward);

// The band of a plan for these lengths alone, and that of one for others too, which has all bounds.
struct Bands {
  Band exact, general;
};

// A band over lengths that the host knows. Only queries [row, row + rows) attend to anything,
// and only to keys [column, column + columns), among which `bands` apply. They have the alignment
// that the band had where that still means something; with slopes it always does.
struct VisibleBand {
  Bands bands;
  int64_t row, rows, column, columns;

  static VisibleBand of(Band band, int64_t length, int64_t length_kv, bool has_slopes);

  // How far the diagonal lies to the right of the top left corner.
  int64_t shift() const {
    return bands.exact.bottom_right ? columns - rows : 0;
  }
};

}  // namespace cudnn_ops
