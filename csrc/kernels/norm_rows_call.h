// What the kernels of norm_forward.cu and norm_backward.cu are called with: one header for both
// sides.
#pragma once

// Rows with a unit stride inside; strides in elements. Where `inner` is 0 all lie `stride` apart;
// else there are `inner` rows in a group and `middle` groups in a larger one.
struct NormRows {
  const void* data;
  long long stride, middle_stride, inner_stride;
  unsigned middle, inner;
};

struct NormCall {
  NormRows input, residual, grad_out, grad_sum;  // data null: absent
  const void *weight, *bias;                     // null: absent
  void *out, *sum;                               // dense; the backward's out: of the input
  float *mean, *rstd;                            // [rows]; the forward writes them unless null
  float* partial;                                // [weight and bias, partials, columns]
  void *grad_weight, *grad_bias;                 // null: not wanted
  unsigned rows, columns, partials;
  unsigned group;      // threads that share a row: the block, or a power of two of one warp's
  unsigned row_bytes;  // that a row takes in shared memory where it is copied whole
  float eps;
  bool is_layer, zero_centered, is_weight_float, is_bias_float;
};
