// What a call on a polymorphic plan loses of the GPU's time, by an estimate that costs nothing:
// losses that were measured on an H200 (docs/measured.md, polymorphic plans), made larger or
// smaller with the GPU. It decides when an exact plan is worth its build (graph/promotion.h), and
// need not be right to more than a factor.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace cudnn_ops {

enum class AttentionStep { kInference, kTraining, kBackward };

// Pairs of a query and a key that a band lets meet, to a few percent; -1 stands for no bound.
inline double attended_pairs(int64_t length, int64_t length_kv, int64_t left, int64_t right,
                             bool bottom_right) {
  constexpr int64_t kSamples = 16;
  const int64_t shift = bottom_right ? length_kv - length : 0;
  int64_t seen = 0;
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t row = (2 * i + 1) * length / (2 * kSamples) + shift;
    const int64_t last = right < 0 ? length_kv : std::min(length_kv, row + right + 1);
    const int64_t first = left < 0 ? 0 : std::max<int64_t>(0, row - left);
    seen += std::max<int64_t>(0, last - first);
  }
  return static_cast<double>(seen) * static_cast<double>(length) / kSamples;
}

// FLOP/s of one multiprocessor in attention of 16 bits.
inline double attention_rate(int sm_version) {
  if (sm_version >= 100 && sm_version < 120) return 7e12;
  if (sm_version == 90) return 3.6e12;
  return 1.6e12;
}

// Seconds. The lengths' table and the log-sum-exp's copy take their time however short a call is;
// masks beyond the lengths take a part of it.
inline double lost_seconds(AttentionStep step, double pairs, int64_t batch, int64_t heads,
                           int64_t head_size, int processors, int sm_version) {
  constexpr double kFixed = 15e-6;
  constexpr double kShares[] = {0.04, 0.06, 0.05};
  constexpr double kProducts[] = {2, 2, 5};
  const auto index = static_cast<size_t>(step);
  const double flops =
      2 * kProducts[index] * pairs * static_cast<double>(batch * heads * head_size);
  return kFixed + kShares[index] * flops / (attention_rate(sm_version) * processors);
}

// Of a tensor of 16 bits that a polymorphic plan cannot address where it lies.
inline double copy_seconds(int64_t elements) {
  constexpr double kLaunch = 5e-6, kBytesPerSecond = 2e12;
  return kLaunch + 4 * static_cast<double>(elements) / kBytesPerSecond;  // read and written
}

}  // namespace cudnn_ops
