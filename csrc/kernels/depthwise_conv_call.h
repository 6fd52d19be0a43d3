// The arguments of the kernels of depthwise_conv_forward.cu, depthwise_conv_rolling.cu,
// depthwise_conv_input.cu and depthwise_conv_weight.cu, for both sides.
#pragma once

namespace depthwise_images {

// Channels of a thread where they are even in number.
constexpr int kPair = 2;
// The same for kernels that have more of them.
constexpr int kWide = 4;
// Pieces of the channels that a block has at most: a warp's.
constexpr int kMostPieces = 32;
// Outputs of a thread, for kernels of a size that is known; images are often multiples of 7 wide.
constexpr int kTileRows = 2, kTileColumns = 7;
// Threads of a block, at most, where they go down the rows of a stretch of outputs.
constexpr int kRollingThreads = 128;
// Where a block has whole images: its threads, at most, and blocks of a multiprocessor; rows of
// outputs of a thread, at most, and pixels of a row beyond which there is one.
constexpr int kWholeThreads = 256, kWholeBlocks = 2, kWholeRows = 2, kMostWhole = 14;
// Outputs of a row that a block has where it has parts of images.
constexpr int kPartColumns = 14;
// Numbers of the input's gradient that a thread has with a stride of 2.
constexpr int kStridedRows = 2, kStridedColumns = 8;
// The same for kernels of any size: outputs of a thread, taps of the weight whose gradients it
// computes together, and outputs that it adds up for those before it goes on to others.
constexpr int kRun = 8, kTaps = 8, kStretch = 32;
// Taps of a row that a block of these keeps at once.
constexpr int kStaged = 64;

}  // namespace depthwise_images

// The input is [batch, size..., channels] and the output [batch, out_size..., channels]; the weight
// is [channels, taps...]. Each channel of out[i] is the sum of weight[k] times
// input[i * stride - padding + k * dilation] over the taps. Depth, height and width.
struct DepthwiseConvShape {
  long long batch;
  int channels;
  int size[3], out_size[3], taps[3], stride[3], dilation[3];
  int padding[3];  // zeros before the input; may be negative
  // How the work is spread over blocks:
  int pieces, strips;  // pieces of the channels that a block has; blocks that have all
  int turns;           // sets of tiles that a block has, one after another; or whole images, or of
                       // their parts rows of outputs
  int tiles[2];        // of an image: down and across
  int stretch;         // rows of outputs of a thread at a time, where it goes down them
  int spread;          // pieces behind each row of whole images, which spread rows over banks
};

struct DepthwiseConvCall {
  DepthwiseConvShape shape;
  const void *input, *weight, *bias, *residual;  // bias, residual: null where there are none
  void *before, *out;                            // before: null where nobody wants it
  int activation;                                // its index in activation_list.h
  bool is_turned;                                // the weight's last tap comes first
};

struct DepthwiseConvWeightCall {
  DepthwiseConvShape shape;
  const void *input, *grad_out;
  // [partials, taps, channels], with the bias as one more tap; for one, blocks write the gradients
  // themselves.
  float* partial;
  void *grad_weight, *grad_bias;  // grad_bias: null where nobody wants it
  unsigned partials;
};
