// The arguments of the kernels of depthwise_conv1d.cu, for both sides.
#pragma once

namespace depthwise {

// Outputs that a thread computes together.
constexpr int kRun = 8;
// Taps of the weight whose gradients a thread computes together.
constexpr int kTaps = 8;
// Outputs in a row that a thread adds up for the weight's gradient before it goes on to others,
// with the channels last; and that the threads of a row do, with the length last and strides.
constexpr int kStretch = 32, kChunk = 4096;

}  // namespace depthwise

// The input is [batch, length, channels] and the output [batch, out_length, channels], or, for the
// kernels of rows, [batch, channels, length]; the weight is [channels, taps]. Each channel of
// out[i] is the sum of weight[k] times input[i * stride - padding + k * dilation] over the taps.
struct DepthwiseConv1dShape {
  long long batch;
  int length, out_length, channels;
  int taps, stride, dilation;
  int padding;  // zeros before the input; may be negative
  int pieces;   // of the channels, that a block has; for rows: threads to a row
  int back;     // for gradients of inputs with a stride: outputs from one to the next that saw it
};

struct DepthwiseConv1dCall {
  DepthwiseConv1dShape shape;
  const void *input, *weight, *bias, *residual;  // bias, residual: null where there are none
  void *before, *out;                            // before: null where nobody wants it
  int activation;                                // its index in activation_list.h
  bool is_turned;                                // the weight's last tap comes first
};

struct DepthwiseConv1dWeightCall {
  DepthwiseConv1dShape shape;
  const void *input, *grad_out;
  float* partial;  // [partials, channels, taps]; for one, blocks write the gradient itself
  void* grad_weight;
  unsigned partials;
};
