// Norms on a GPU are run by kernels of our own, for any number of rows, or by cuDNN's plan for
// exactly one number: which is faster, and by which engine, was measured (python -m cudnn_ops tune
// norms). The tables come with the package (cudnn_ops/plans/tuned), handed over by Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cudnn_ops {

enum class NormPlan : int64_t { kInference, kTraining, kBackward };

struct NormChoice {
  NormPlan plan;
  bool is_layer;
  int64_t row_bytes, rows;
  bool is_faster;      // than our kernels
  std::string engine;  // the fastest of cuDNN's
};

// Takes the place of the table that `sm_version` had; not consulted with an older cuDNN loaded.
// With newer ones up to 9.28.1 cuDNN was measured to be faster at the same sizes.
void set_norm_table(int sm_version, size_t cudnn_version, std::vector<NormChoice> choices);

// Whether cuDNN was measured to be faster at all sizes that surround this one: the row bytes
// measured next to these on either side, and for each the numbers of rows next to this one. Never
// of rows wider than any measured.
bool is_cudnn_faster(int sm_version, NormPlan plan, bool is_layer, int64_t row_bytes, int64_t rows);

// The fastest of cuDNN's engines at the nearest size, by the ratios of row bytes and rows; empty
// where nothing was measured.
std::string nearest_engine(int sm_version, NormPlan plan, bool is_layer, int64_t row_bytes,
                           int64_t rows);

}  // namespace cudnn_ops
