#include "ops/conv/conv_choice.h"

#include <c10/util/accumulate.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

struct Channels {
  int64_t inputs, outputs;  // of a group
  bool is_grouped;
  int64_t taps;  // of a kernel

  explicit Channels(const ConvParams& params)
      : inputs(params.weight.sizes[1]),
        outputs(params.weight.sizes[0] * inputs / std::max<int64_t>(params.input.sizes[1], 1)),
        is_grouped(params.input.sizes[1] != inputs),
        taps(c10::multiply_integers(params.weight.sizes.begin() + 2,
                                    params.weight.sizes.begin() + params.weight.rank)) {
  }
};

// Whether cuDNN compiles a kernel for this epilogue; for the others it has precompiled ones.
bool is_compiled(ConvActivation activation) {
  return activation != ConvActivation::kNone && activation != ConvActivation::kRelu;
}

// The bare convolution has kernels of its own. With an epilogue there are a generic kernel, which
// took up to 23 times as long, and for few taps in half and single precision compiled ones, which
// took 0.6 to 0.8 of the time of two passes. In three dimensions neither has good ones, and beyond
// 27 taps the fused one took 0.4 of the time.
bool is_slow_depthwise(const ConvParams& params, const Channels& channels) {
  constexpr int64_t kFewTaps = 9, kManyTaps = 27;
  if (!channels.is_grouped || channels.inputs != 1) return false;
  if (params.steps.dims == 3) return channels.taps <= kManyTaps;
  return params.input.dtype == c10::ScalarType::BFloat16 || !is_compiled(params.activation) ||
         channels.taps > kFewTaps;
}

// Compiled kernels pad each group to a tile: they took up to 8 times as long for 8 channels a
// group, as long for 32, and 0.3 of the time for 64.
bool is_slow_grouped(const Channels& channels) {
  constexpr int64_t kNarrow = 16;
  return channels.inputs > 1 && channels.inputs <= kNarrow && channels.is_grouped &&
         channels.inputs == channels.outputs;
}

// Compiled kernels load numbers one by one: they took 1.5 times as long where they load many.
bool is_slow_odd(const ConvParams& params, const Channels& channels) {
  constexpr int64_t kMany = 64;
  return !channels.is_grouped && params.steps.dims == 2 && channels.inputs % 2 == 1 &&
         channels.inputs * channels.taps > kMany && is_compiled(params.activation) &&
         params.input.dtype != c10::ScalarType::Float;
}

}  // namespace

std::string_view reason_for_bare(const ConvParams& params) {
  const bool has_epilogue = params.bias.rank > 0 || params.residual.rank > 0 ||
                            params.activation != ConvActivation::kNone;
  if (!has_epilogue) return {};
  const Channels channels(params);
  if (is_slow_depthwise(params, channels)) {
    return "cuDNN's kernel for a depthwise convolution, the one that torch runs, supports no "
           "epilogue, "
           "and those that do are slower";
  }
  if (is_slow_grouped(channels)) {
    return "cuDNN's kernel for groups of few channels, the one that torch runs, supports no "
           "epilogue, "
           "and those that do are slower";
  }
  if (is_slow_odd(params, channels)) {
    return "with an odd number of channels cuDNN's kernel without an epilogue, the one that torch "
           "runs, is faster";
  }
  return {};
}

// Measured on an H200 (cuDNN 9.19) for depthwise convolutions of one dimension: cuDNN's time, then
// that of torch's kernel, in ms.
//                                        forward        of the input   of the weight
//   bfloat16 8x2048, length 2048, k 4    1.157 / 0.552  0.966 / 0.515  0.918 / 0.416
//   bfloat16 1x256, length 2000, k 15    0.028 / 0.016  0.028 / 0.017  no slower
//   float32  8x512, length 1500, k 31    no slower      0.846 / 0.190  1.567 / 0.328
// For bfloat16 8x512 with k 31, 8x2048 with k 3 and float16 with k 7, cuDNN's are far faster. In
// float16 and in two dimensions torch runs cuDNN's itself. Strides and dilations were not measured.
std::string_view reason_for_torch(const Conv& args, ConvStep step) {
  constexpr int64_t kFewTaps = 7, kSmall = int64_t{1} << 20;
  // Some of torch's kernels count in 32 bits.
  constexpr int64_t kLarge = int64_t{1} << 30;
  if (args.dims() != 1 || args.geometry.stride(0) != 1 || args.geometry.dilation(0) != 1) return {};
  const auto dtype = args.input.scalar_type();
  if (dtype == at::kHalf) return {};
  const int64_t channels = args.input.size(1), taps = args.weight.size(2);
  const int64_t numbers = args.input.size(0) * channels * args.input.size(2);
  const bool is_depthwise =
      channels > 1 && args.geometry.groups() == channels && args.weight.size(0) == channels;
  if (!is_depthwise || numbers > kLarge) return {};
  if (taps % 2 == 0) {
    return "torch's own kernel runs: for a depthwise convolution of one dimension with an even "
           "kernel it is faster than cuDNN's";
  }
  if (taps <= kFewTaps) return {};
  if (step != ConvStep::kForward && dtype == at::kFloat) {
    return "torch's own kernel runs: for the gradients of a depthwise convolution of one dimension "
           "with a long kernel in float32 it is faster than cuDNN's";
  }
  if (step != ConvStep::kWeightGradient && numbers <= kSmall) {
    return "torch's own kernel runs: for a small depthwise convolution of one dimension with a "
           "long kernel it is faster than cuDNN's";
  }
  return {};
}

}  // namespace cudnn_ops
