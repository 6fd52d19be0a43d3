// A linear layer on a GPU is a product with what follows it in cuBLASLt's epilogue, or a product
// and one kernel of ours over its result. Which is faster was measured (python -m cudnn_ops tune
// linear). The tables come with the package (cudnn_ops/plans/tuned), handed over by Python.
#pragma once

#include "ops/activation.h"

#include <cstdint>
#include <vector>

namespace cudnn_ops {

// What is computed: a layer for inference; one that a gradient follows; the gradient of a hidden
// layer, through the activation, and its sum for the bias; that of a weight and of a bias together.
enum class LinearStep : int64_t { kInference, kTraining, kHiddenGradient, kWeightGradient };

enum class LinearEngine : int64_t {
  kOurs,         // a kernel of ours does what is not the product
  kEpilogue,     // cuBLASLt does, but for the sum
  kEpilogueSum,  // cuBLASLt does, with the sum
};

// Of a product of [rows, depth] and [depth, columns].
struct LinearProblem {
  LinearStep step;
  Activation activation;
  int64_t rows, columns, depth;
};

struct LinearChoice {
  LinearProblem problem;
  LinearEngine engine;
};

// Takes the place of the table that `sm_version` had.
void set_linear_table(int sm_version, std::vector<LinearChoice> choices);

// The engine that was the fastest of those measured at the nearest size, by the ratios of rows,
// columns and depth; kOurs where nothing was.
LinearEngine choose_engine(int sm_version, const LinearProblem& problem);

}  // namespace cudnn_ops
