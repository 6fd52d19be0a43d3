// What the kernels of batch_norm_pixels.cu are called with: one header for both sides.
#pragma once

#include "kernels/batch_norm_call.h"

// Images with their channels last. A block has some pieces of the channels, and every
// `stretches`-th stretch of as many pixels as it has threads for.
struct BatchNormPixels {
  unsigned channels, pieces, stretches;
  long long rows;  // pixels
  // Each thread has so many; a whole stretch one pixel more in as many blocks as `longer`, and the
  // block behind these in the first `rest` of its rows of threads.
  float turns;
  unsigned longer, rest;
};

// A number for each channel to be written, float32 or of the images' type; null: not wanted.
struct BatchNormOutVector {
  void* data;
  bool is_float;
};

struct BatchNormStatsCall {
  const void* input;
  float* partial;  // of each stretch the means of all channels, then the squares of what is left
  float *mean, *rstd;
  BatchNormOutVector running_mean, running_var;
  float eps, momentum;
  BatchNormPixels pixels;
};

struct BatchNormGradientCall {
  // more: added to the gradient by kernels of two. out: what the ReLU gave, where that cannot be
  // told from the input alone.
  const void *grad, *more, *input, *out;
  const float *mean, *rstd;
  BatchNormVector weight, bias;
  float* partial;  // of each stretch the sums of all channels, then their sums of products
  float* sums;     // of all stretches, likewise
  void* masked;    // what came through the ReLU; null: not wanted
  void* grad_input;
  BatchNormOutVector grad_weight, grad_bias;
  BatchNormPixels pixels;
};
