// From the arguments of a call to the problem that cuDNN is given: nothing here needs a GPU, so
// what only asks for a plan (sdpa_plan_key.cpp) comes to the same one as the kernels.
#pragma once

#include "ops/attention/dense/sdpa.h"
#include "ops/attention/band.h"
#include "ops/attention/attention_params.h"

#include <utility>

namespace cudnn_ops {

// Whether the plan is told how long each sequence is: where the caller says it, and where cuDNN
// would mistake what lies behind the last key for keys.
bool needs_lengths(const Sdpa& args, const Band& band, bool backward);
// Whether the caller says it, so that there are rows of which cuDNN computes nothing.
inline bool is_padded(const Sdpa& args) {
  return args.seq_lens_q || args.seq_lens_kv;
}

// The mask as numbers that are added to the scores, [1 or B, 1 or H, Sq, Skv]; undefined without
// one. One that is the same for all queries stays so in memory, with a stride of 0: told that its
// size is 1, cuDNN 9.19 computes wrong gradients, and writes beyond the end of the mask's own.
// Slopes that are measured from the end of sequences whose lengths the plan is told are part of it:
// cuDNN 9.19 reads the lengths wrongly in such arithmetic.
at::Tensor bias_of(const Sdpa& args, const Band& band, bool backward);
bool has_slopes_in_bias(const Sdpa& args, const Band& band, bool backward);

// What a plan bakes in of the mask. The backward needs no sinks: they are in the log-sum-exp.
SdpaMask mask_of(const Sdpa& args, const Band& band, const at::Tensor& bias, bool backward);

// Whether a single query is given to cuDNN as one of two. It has no sinks for one; its kernel for
// one computes slopes wrongly and reads beyond memory with dropout (9.19, measured on an H200). Its
// backward for one gives NaN for keys and values where the log-sum-exp is below -88.7 (likewise),
// is refused for one key, and of one head and batch entry kills the process from 9.26 on.
bool needs_two_queries(const Sdpa& args, const Band& band, bool backward);
// How many come before and behind the one: so that its distance from the diagonal stays.
std::pair<int64_t, int64_t> place_of_second_query(const Sdpa& args, const Band& band);
// The band of the two: the general one, so that they are of the family of other lengths, where that
// hides neither.
Band band_of_two_queries(const Bands& bands);

// cuDNN 9.19 skips what a band hides only where it ends at the diagonal of the top left corner;
// else its backward computes all scores (measured on an H200: 22 ms and not 1.8 for a window of
// 1024 at length 16384). Queries of no weight, put before the others, move the diagonal there.
// How many, where that is less work; else 0.
int64_t queries_to_align(const Sdpa& args, const VisibleBand& visible);
// The window that then applies, together with the causal mask.
int64_t left_when_aligned(const VisibleBand& visible, int64_t before);

}  // namespace cudnn_ops
