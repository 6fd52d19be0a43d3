// The argument of the kernels of batch_norm_fold.cu, for both sides.
#pragma once

// As many as the parameters of a kernel, 4 KB, have room for.
constexpr int kMostFoldedNorms = 48;

// A convolution's weight and bias, and the batch norm behind it.
struct FoldedNorm {
  const void* weight;  // [outputs, inputs, pixels]
  const void* bias;    // here and below [outputs]; null: none
  const void* mean;
  const void* var;
  const void* norm_weight;  // null: 1
  const void* norm_bias;    // null: 0
  void* out_weight;         // [outputs, pixels, inputs]
  void* out_bias;
  float eps;
  unsigned end;  // one after the last of its blocks, of which each output has one
  unsigned inputs, pixels;
};

struct BatchNormFoldCall {
  FoldedNorm norms[kMostFoldedNorms];
};
