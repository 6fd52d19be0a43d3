// What the kernels of grouped_conv.cu are called with: one header for both sides.
#pragma once

// A block computes so many pixels of so many of a group's outputs, from so many stages of memory
// that are on their way.
constexpr int kGroupedConvPixels = 128, kGroupedConvOutputs = 64, kGroupedConvStages = 3;
constexpr int kGroupedConvThreads = 128;
// Between rows of shared memory, so that eight of them lie in different banks.
constexpr int kGroupedConvGap = 8, kGroupedConvResultGap = 4;

// Images with the channels last; weights [outputs, taps, channels of a group]. Of the output's
// pixels and of the taps each so many-th is computed, from the first one on.
struct GroupedConvCall {
  const void *input, *weight, *bias, *residual;  // bias, residual: null where there are none
  void *before, *out;                            // before: null where nobody wants it
  long long pixels;                              // that are computed, of all images
  unsigned rows, columns;                        // of these in an image
  unsigned all_rows, all_columns;                // of the output
  int in_rows, in_columns;
  unsigned channels, outputs;  // of all groups
  unsigned width, out_width;   // of a group; multiples of 8
  unsigned out_first[2], out_step[2];
  unsigned taps[2], tap_first[2], tap_step[2];  // taps: that are computed
  unsigned all_taps, taps_of_row;
  unsigned stride[2];
  int dilation[2], padding[2];  // of those that are computed; negative: from an output back
  int activation;               // its place in activation_list.h
};
