// What the kernels of batch_norm.cu are called with: one header for both sides.
#pragma once

// A number for each channel, float32 or of the images' type; null: absent.
struct BatchNormVector {
  const void* data;
  bool is_float;
};

struct BatchNormApplyCall {
  const void *input, *residual;  // residual: null where there is none
  void* out;
  BatchNormVector mean, spread, weight, bias;  // mean: absent, 0
  float eps;
  bool is_variance;  // `spread`, else it is 1 / deviation
  bool has_relu;
  unsigned channels;
  long long rows;  // pixels where channels are last in memory, else planes: channels of all samples
  unsigned pieces;      // of a pixel, that a block has
  long long positions;  // of a plane
};

// Where channels are planes of positions.
struct BatchNormSumsCall {
  const void *grad, *input;
  const float* mean;
  float* partial;  // of each stretch, the sums of all channels and then their sums of products
  float* sums;     // of all stretches, likewise
  unsigned channels, stretches;
  long long samples, positions;
};

// A vector of numbers for each channel into another one, which is of either type too.
struct BatchNormCopyOf {
  BatchNormVector from;
  float otherwise;  // where `from` is absent
  void* to;
  bool is_to_float;
};

struct BatchNormCopyCall {
  BatchNormCopyOf copies[4];
  unsigned channels;
};
