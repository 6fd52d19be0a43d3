// A linear layer on a GPU is a product with what follows it in cuBLASLt's epilogue, or a product
// and one kernel of ours over its result; both serve any number of rows. Or it is one graph of
// cuDNN, whose plan serves exactly one. Which is faster was measured (python -m cudnn_ops tune
// linear). The tables come with the package (cudnn_ops/plans/tuned), handed over by Python.
#pragma once

#include "ops/activation.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cudnn_ops {

// What is computed: a layer for inference; one that a gradient follows; the gradient of a hidden
// layer, through the activation, and its sum for the bias; that of a weight and of a bias together;
// and the first of two layers that keeps the activation's slope, for which the graph is faster
// where both layers, forward and backward, are.
enum class LinearStep : int64_t {
  kInference,
  kTraining,
  kHiddenGradient,
  kWeightGradient,
  kTrainingSlope,
};

// What runs without a plan.
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
  LinearEngine engine;      // the fastest of these
  bool is_graph_faster;     // whether cuDNN's graph is faster still
  std::string plan_engine;  // the fastest of cuDNN's engines; empty where none was measured
};

// Takes the place of the table that `sm_version` had. What it says of cuDNN's graphs is not
// consulted with another cuDNN loaded.
void set_linear_table(int sm_version, size_t cudnn_version, std::vector<LinearChoice> choices);

// All of these go by what was measured at the nearest size, by the ratios of rows, columns and
// depth. Where nothing was: kOurs, false, and nothing. A graph is not faster where the nearest size
// is far away.
LinearEngine choose_engine(int sm_version, const LinearProblem& problem);
bool is_graph_faster(int sm_version, const LinearProblem& problem);
std::string measured_plan_engine(int sm_version, const LinearProblem& problem);

}  // namespace cudnn_ops
