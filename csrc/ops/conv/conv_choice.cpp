#include "ops/conv/conv_choice.h"

#include "graph/cudnn_library.h"
#include "kernels/depthwise_conv.h"
#include "kernels/grouped_conv.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <utility>

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

bool is_power_of_two(int64_t number) {
  return (number & (number - 1)) == 0;
}

// Whether cuDNN compiles a kernel for this epilogue; for the others it has precompiled ones.
bool is_compiled(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kRelu;
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
// group. Wider groups were measured on an H100 (cuDNN 9.19, 60 sizes). The precompiled kernels with
// an epilogue are good for 32, 64, 128 and 256 channels, as many in as out, and few taps: for all
// others they took 1.2 to 23 times as long as those without. Compiled ones took 0.1 to 0.9 of two
// passes, but for many numbers in groups of 40, 56 and multiples of 64 channels, 1.2 to 2 times as
// long.
bool is_slow_grouped(const ConvParams& params, const Channels& channels) {
  constexpr int64_t kNarrow = 16, kCompiled = 64, kManyNumbers = int64_t{1} << 21;
  constexpr int64_t kFewTaps = 9, kSomeTaps = 25, kSomeChannels = 32;
  const int64_t width = channels.inputs;
  if (width <= 1 || !channels.is_grouped) return false;
  if (!is_compiled(params.activation)) {
    if (width != channels.outputs || width <= kNarrow || !is_power_of_two(width)) return true;
    return channels.taps > (width <= kSomeChannels ? kSomeTaps : kFewTaps);
  }
  if (width != channels.outputs) return false;
  if (width <= kNarrow) return true;
  const auto& out = params.out.sizes;
  const bool has_many =
      c10::multiply_integers(out.begin(), out.begin() + params.out.rank) >= kManyNumbers;
  return has_many && (width == 40 || width == 56 || width % kCompiled == 0);
}

constexpr int64_t kManyProducts = 64;

// Compiled kernels load numbers one by one: they took 1.5 times as long where they load many.
bool is_slow_odd(const ConvParams& params, const Channels& channels) {
  return !channels.is_grouped && params.steps.dims == 2 && channels.inputs % 2 == 1 &&
         channels.inputs * channels.taps > kManyProducts && is_compiled(params.activation) &&
         params.input.dtype != c10::ScalarType::Float;
}

// The precompiled kernels with an epilogue took 1.2 to 1.5 times as long as those without where
// channels are odd in number or those of a group no whole vectors, and where the output is one
// pixel.
bool is_slow_precompiled(const ConvParams& params, const Channels& channels) {
  constexpr int64_t kVector = 8;
  if (params.steps.dims != 2 || is_compiled(params.activation) ||
      channels.inputs * channels.taps <= kManyProducts) {
    return false;
  }
  const auto& out = params.out.sizes;
  const bool is_one_pixel = channels.taps > 1 && out[2] * out[3] == 1;
  const bool is_odd = channels.inputs % 2 == 1 || channels.outputs % 2 == 1;
  return is_one_pixel || is_odd || (channels.is_grouped && channels.inputs % kVector != 0);
}

bool is_depthwise_row(const Conv& args) {
  const int64_t channels = args.input.size(1);
  return args.dims() == 1 && !args.geometry.is_transposed() && channels > 1 &&
         channels == args.geometry.groups() && channels == args.weight.size(0);
}

// For bfloat16 8x2048 of length 2048 with 4 taps and the channels last cuDNN takes 0.76 to 1.2 ms
// on an H200, and torch's own kernel 0.55, with copies between its layout and ours; ours takes
// 0.067.
bool is_for_depthwise_kernel(const Conv& args) {
  // Kernels of ours count positions and the numbers of a sample and of a weight in 32 bits, some of
  // them beyond what there is.
  constexpr int64_t kMost = int64_t{1} << 30, kMostStep = int64_t{1} << 19;
  if (!is_depthwise_row(args)) return false;
  const auto& geometry = args.geometry;
  const int64_t taps = args.weight.size(2), channels = args.input.size(1);
  const int64_t reach = args.input.size(2) + geometry.before(0) + geometry.after(0) +
                        (taps + 1) * geometry.dilation(0);
  return taps <= kMost / channels && reach <= std::min(kMost, 4 * kMost / channels) &&
         geometry.stride(0) <= kMostStep && geometry.dilation(0) <= kMostStep;
}

// As many channels in the output as in the input, each with a kernel of its own.
bool is_depthwise_image(const Conv& args) {
  const int64_t channels = args.input.size(1);
  return args.dims() > 1 && channels > 1 && channels == args.geometry.groups() &&
         channels == args.weight.size(0);
}

// Kernels of ours count positions and the numbers of a row in 32 bits, some of them beyond what
// there is; and taps by a grid's second dimension.
bool is_for_depthwise_images(const Conv& args) {
  constexpr int64_t kMost = int64_t{1} << 30, kMostTaps = 65535;
  if (!is_depthwise_image(args)) return false;
  const auto& geometry = args.geometry;
  int64_t lines = 1, taps = 1;
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    const auto at = static_cast<int64_t>(dim) + 2;
    const int64_t count = args.weight.size(at), dilation = geometry.dilation(dim);
    if (geometry.stride(dim) > kMost || dilation > kMost) return false;
    const int64_t padded = args.input.size(at) + geometry.before(dim) + geometry.after(dim);
    if (padded > kMost || (count + 1) * dilation + geometry.stride(dim) > kMost - padded) {
      return false;
    }
    lines *= padded, taps *= count;
    if (lines > kMost) return false;
  }
  return taps <= std::min(kMostTaps, kMost / args.input.size(1));
}

// From how many numbers of the input on ours are faster: fewer leave multiprocessors idle, where
// ours took up to 3 times as long.
constexpr int64_t kFew = 1 << 16, kSome = 3 << 17, kMany = 1 << 20, kMore = 1 << 21;

// Where our kernels were measured to be faster than cuDNN's bare convolution, which is what torch
// runs, for half precision on an H200 (benchmarks/bench_depthwise.py, steps): the step, the taps of
// a side, the stride, the least number of pixels that the image's shorter side has, over the
// stride, and the least numbers. Behind cuDNN's an epilogue is a pass of its own over memory, with
// which it took 1.4 to 3.5 times as long as ours.
struct FasterDepthwise {
  ConvStep step;
  int64_t taps, stride, least_side, least_numbers = kMany;
  bool needs_epilogue = false;
};

// Rows of an image, over the stride, up to which kernels have whole ones.
constexpr int64_t kMostWhole = 14;
// From how many numbers on these are faster in the gradient of the input, and from how many images
// of 7 x 7 outputs on in that of the weight: of 8 and 32 images cuDNN's took 0.8 to 0.95 of the
// time. Images by parts gain there with few numbers and with so many: between, cuDNN's took 0.91.
constexpr int64_t kLeastOfInput = 3 << 15, kLeastImages = 48, kLeastOfParts = 10 << 20;

constexpr FasterDepthwise kFasterDepthwise[] = {
    {ConvStep::kForward, 3, 1, 1},
    {ConvStep::kForward, 3, 1, 1, kFew, true},
    {ConvStep::kForward, 3, 2, 1},
    {ConvStep::kForward, 5, 1, 1},
    {ConvStep::kForward, 5, 1, 1, kFew, true},
    {ConvStep::kForward, 5, 2, 1},
    {ConvStep::kForward, 7, 1, 1, kFew},
    {ConvStep::kInputGradient, 3, 1, 1, kMore},
    {ConvStep::kInputGradient, 3, 2, 1},
    {ConvStep::kInputGradient, 5, 1, 1},
    {ConvStep::kInputGradient, 5, 2, 1},
    {ConvStep::kInputGradient, 7, 1, 1, kSome},
    {ConvStep::kInputGradient, 7, 2, 1},
    {ConvStep::kWeightGradient, 3, 1, 14},
    {ConvStep::kWeightGradient, 3, 2, 7},
    {ConvStep::kWeightGradient, 5, 2, 28},
    {ConvStep::kWeightGradient, 7, 1, 56},
};

// From here on, with dilation, and in three dimensions cuDNN's kernels are general ones: ours took
// 0.002 to 0.55 of their time.
constexpr int64_t kManyTaps = 9;

bool has_epilogue(const Conv& args) {
  return args.bias || args.residual || args.kind() != Activation::kNone;
}

bool is_faster_depthwise(const Conv& args, ConvStep step) {
  const auto& geometry = args.geometry;
  const auto& input = args.input;
  if (input.element_size() != 2 || input.size(1) % 2 != 0) return false;
  const int64_t numbers = input.numel();
  if (args.dims() == 3) return numbers >= kMany;
  const int64_t taps = args.weight.size(2), stride = geometry.stride(0);
  if (args.weight.size(3) != taps || geometry.stride(1) != stride) return false;
  const bool is_dilated = geometry.dilation(0) != 1 || geometry.dilation(1) != 1;
  if (taps > 1 && (is_dilated || taps >= kManyTaps)) return stride == 1 && numbers >= kMany;
  const int64_t side = std::min(input.size(2), input.size(3)) / stride;
  const int64_t pixels = input.size(3), channels = input.size(1);
  const int64_t outputs = (pixels + geometry.before(1) + geometry.after(1) - taps) / stride + 1;
  const bool is_whole =
      input.size(2) <= kMostWhole * stride &&
      has_whole_kernels(channels, pixels, outputs, taps, stride, geometry.before(1));
  if (is_whole && step == ConvStep::kForward) return numbers >= kFew;
  // The gradient of the input has those kernels where it is a convolution with a stride of 1.
  if (is_whole && step == ConvStep::kInputGradient && stride == 1) return numbers >= kLeastOfInput;
  if (is_whole && step == ConvStep::kWeightGradient) {
    const bool is_small = outputs < kMostWhole && stride == 1;
    return numbers >= kFew && (!is_small || input.size(0) >= kLeastImages);
  }
  if (step == ConvStep::kWeightGradient && has_part_kernels(channels, outputs, taps, stride)) {
    return numbers >= kSome && (numbers <= kMany || (taps == 7 && numbers >= kLeastOfParts));
  }
  return std::any_of(std::begin(kFasterDepthwise), std::end(kFasterDepthwise),
                     [&](const FasterDepthwise& row) {
                       return row.step == step && row.taps == taps && row.stride == stride &&
                              row.least_side <= side && row.least_numbers <= numbers &&
                              (!row.needs_epilogue || has_epilogue(args));
                     });
}

constexpr size_t kSteps = 3;
std::array<std::atomic<KernelUse>, kSteps> depthwise_use{};

// Nothing to say where it is not a question of speed.
KernelChoice choose_depthwise_images(const Conv& args, ConvStep step) {
  const KernelUse use = depthwise_use.at(static_cast<size_t>(step));
  if (use == KernelUse::kNever || !is_for_depthwise_images(args)) return {};
  if (use == KernelUse::kMeasured && !is_faster_depthwise(args, step)) {
    return {ConvKernel::kPlan, "",
            "no kernel of cudnn_ops runs: for depthwise convolutions of this size none was "
            "measured to be faster than cuDNN's, the one that torch runs"};
  }
  return {ConvKernel::kDepthwiseImages, "cudnn_ops",
          step == ConvStep::kForward && has_epilogue(args)
              ? "a kernel of cudnn_ops runs: for depthwise convolutions of this size it is faster "
                "than cuDNN's and a pass for the epilogue, all of which it computes"
              : "a kernel of cudnn_ops runs: for depthwise convolutions of this size it is faster "
                "than cuDNN's"};
}

// What the kernel for groups reads and writes: the gradient of the input is a convolution of the
// output's, with as many channels in as the other has out.
struct GroupWidths {
  int64_t inputs, outputs, groups;

  GroupWidths(const Conv& args, ConvStep step)
      : inputs(args.weight.size(1)),
        outputs(args.weight.size(0) / args.geometry.groups()),
        groups(args.geometry.groups()) {
    if (step == ConvStep::kInputGradient) std::swap(inputs, outputs);
  }
};

// Whole vectors of channels in half precision, and counts that fit in 32 bits.
bool is_for_grouped(const Conv& args, ConvStep step) {
  constexpr int64_t kMost = int64_t{1} << 28, kMostTiles = 65535;
  const auto& geometry = args.geometry;
  if (step == ConvStep::kWeightGradient || args.dims() != 2 || geometry.groups() <= 1 ||
      geometry.is_transposed() || args.input.element_size() != 2) {
    return false;
  }
  const GroupWidths widths(args, step);
  if (widths.inputs % kGroupedConvChannels != 0 || widths.outputs % kGroupedConvChannels != 0 ||
      widths.groups > kMostTiles / (widths.outputs / kGroupedConvChannels)) {
    return false;
  }
  int64_t lines = args.input.size(0);
  for (size_t dim = 0; dim < 2; ++dim) {
    const auto at = static_cast<int64_t>(dim) + 2;
    const int64_t count = args.weight.size(at), dilation = geometry.dilation(dim);
    const int64_t padded = args.input.size(at) + geometry.before(dim) + geometry.after(dim);
    // A launch for each remainder by the stride, of taps that lie as far apart.
    const bool is_for_gradient =
        geometry.stride(dim) == 1 || (geometry.stride(dim) == 2 && (dilation == 1 || count == 1));
    if (step == ConvStep::kInputGradient && !is_for_gradient) return false;
    if (std::max({padded, geometry.stride(dim), dilation}) > kMost || count > kMost / dilation) {
      return false;
    }
    if (dim == 0) lines *= padded;
  }
  return lines <= kMost;
}

// Where the kernel for groups was measured to be faster than cuDNN's with the channels last (H100,
// cuDNN 9.19, 150 sizes): 1.1 to 8 times as fast.
bool is_faster_grouped(const Conv& args, ConvStep step) {
  // Of more taps and more channels cuDNN's took down to 0.2 of the time.
  constexpr int64_t kMostTaps = 9, kMostChannels = 128;
  const GroupWidths widths(args, step);
  const int64_t taps = args.weight.size(2) * args.weight.size(3), width = widths.inputs;
  if (taps > kMostTaps || std::max(width, widths.outputs) > kMostChannels) return false;
  bool is_strided = false;
  for (size_t dim = 0; dim < args.dims(); ++dim) is_strided |= args.geometry.stride(dim) != 1;
  if (step == ConvStep::kInputGradient && is_strided) {
    // H200, 44 sizes: 1.1 to 4.2 times as fast; of 8 to 32 channels a group cuDNN's took 0.4 to 1.1
    // of the time, of a single tap 0.3 to 0.6.
    constexpr int64_t kLeastPowerOfTwo = 64;
    const bool is_for_cudnn = width == widths.outputs && is_power_of_two(width);
    return taps > 1 && (!is_for_cudnn || width >= kLeastPowerOfTwo);
  }
  if (width != widths.outputs) return true;
  constexpr int64_t kPointwiseChannels = 64;
  if (taps == 1) return width <= kPointwiseChannels;
  if (is_power_of_two(width)) {
    return width == 16 && widths.groups <= 4 && step == ConvStep::kForward;
  }
  // In few groups of these, of many numbers, cuDNN's took 0.9 to 0.95 of the time.
  constexpr int64_t kManyNumbers = int64_t{1} << 22;
  const bool is_few = (width == 24 && widths.groups == 2) || (width == 56 && widths.groups == 3);
  return !is_few || args.input.numel() < kManyNumbers;
}

std::atomic<KernelUse> grouped_use{KernelUse::kMeasured};

KernelChoice choose_grouped(const Conv& args, ConvStep step) {
  const KernelUse use = grouped_use;
  if (use == KernelUse::kNever || !is_for_grouped(args, step)) return {};
  if (use == KernelUse::kMeasured && !is_faster_grouped(args, step)) return {};
  return {ConvKernel::kGrouped, "cudnn_ops",
          step == ConvStep::kForward
              ? "a kernel of cudnn_ops runs: it computes the whole epilogue, and for groups of "
                "this many channels it is faster than cuDNN's"
              : "a kernel of cudnn_ops runs: for groups of this many channels it is faster than "
                "cuDNN's"};
}

// Kernels that see all of a sample at once: one output, of one product. A gradient of the weight is
// a sum of as many products as there are samples; of one it took 1.6 times as long as cuDNN's.
bool is_product(const Conv& args, ConvStep step) {
  constexpr int64_t kLeastBatch = 8;
  const auto& input = args.input;
  const auto& weight = args.weight;
  const auto& geometry = args.geometry;
  if (input.scalar_type() == at::kFloat || geometry.groups() != 1) return false;
  if (step == ConvStep::kWeightGradient && input.size(0) < kLeastBatch) return false;
  int64_t taps = 1;
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    const int64_t at = static_cast<int64_t>(dim) + 2, size = weight.size(at);
    const bool is_dense = size == 1 || geometry.dilation(dim) == 1;
    if (input.size(at) != size || !is_dense || geometry.before(dim) + geometry.after(dim) != 0) {
      return false;
    }
    taps *= size;
  }
  return taps > 1;
}

// cuDNN compiles the kernels of transposed convolutions with an epilogue: for half and single
// precision on tensor cores, without groups, and with whole vectors of channels.
std::string_view reason_for_bare_transposed(const ConvParams& params) {
  constexpr int64_t kVectorBytes = 16;
  const auto vector = kVectorBytes / static_cast<int64_t>(c10::elementSize(params.input.dtype));
  const int64_t inputs = params.input.sizes[1], outputs = params.out.sizes[1];
  if (params.weight.sizes[1] != outputs || inputs % vector != 0 || outputs % vector != 0) {
    return "for groups and for channels that are no multiple of 16 bytes, transposed convolutions "
           "run in cuDNN's kernel without an epilogue, the one that torch runs";
  }
  if (params.input.dtype == c10::ScalarType::Float && !params.allow_tf32) {
    return "in float32 without TF32, transposed convolutions run in cuDNN's kernel without an "
           "epilogue, the one that torch runs";
  }
  // For images the compiled kernels took 1.3 to 1.9 times as long as those without an epilogue
  // (H100, cuDNN 9.19, 9 shapes of benchmarks/bench_conv_transpose.py). A pass over the result
  // takes less than that from so many products a number on.
  constexpr int64_t kPassProducts = 512;
  const auto& kernel = params.weight.sizes;
  const bool is_row = params.input.sizes[2] == 1 && kernel[2] == 1;
  if (params.steps.dims == 2 && !is_row &&
      inputs * kernel[2] * kernel[3] >=
          kPassProducts * params.steps.stride[0] * params.steps.stride[1]) {
    return "for many channels, transposed convolutions of images are faster in cuDNN's kernel "
           "without an epilogue, the one that torch runs, and a pass behind it";
  }
  // 9.19 refuses it and 9.28 does not. Known here, so that whoever asks for plans ahead of the
  // calls gets the one that runs.
  constexpr size_t kFirstWithVolumes = 92800;
  if (params.steps.dims == 3 && graph::cudnn().version < kFirstWithVolumes) {
    return "before version 9.28 cuDNN has no transposed convolution of volumes with an epilogue";
  }
  return {};
}

}  // namespace

std::string_view reason_for_bare(const ConvParams& params) {
  const bool has_epilogue =
      params.bias.rank > 0 || params.residual.rank > 0 || params.activation != Activation::kNone;
  if (!has_epilogue) return {};
  if (params.is_transposed) return reason_for_bare_transposed(params);
  const Channels channels(params);
  if (is_slow_depthwise(params, channels)) {
    return "cuDNN's kernel for a depthwise convolution, the one that torch runs, supports no "
           "epilogue, "
           "and those that do are slower";
  }
  if (is_slow_grouped(params, channels)) {
    return "for groups of this many channels cuDNN's kernel without an epilogue, the one that "
           "torch "
           "runs, is faster";
  }
  if (is_slow_odd(params, channels)) {
    return "with an odd number of channels cuDNN's kernel without an epilogue, the one that torch "
           "runs, is faster";
  }
  if (is_slow_precompiled(params, channels)) {
    return "for an odd number of channels, groups of few, and an output of one pixel cuDNN's "
           "kernel without an epilogue, the one that torch runs, is faster";
  }
  return {};
}

KernelChoice choose_kernel(const Conv& args, ConvStep step) {
  if (is_for_depthwise_kernel(args)) {
    return {ConvKernel::kDepthwise, "cudnn_ops",
            "a kernel of cudnn_ops runs: it computes the whole epilogue, and for depthwise "
            "convolutions of one dimension it is faster than cuDNN's"};
  }
  if (is_product(args, step)) {
    return {ConvKernel::kProduct, "torch",
            "a matrix product of torch runs: the kernel is as large as the input, and cuDNN's "
            "convolutions are slower there"};
  }
  if (is_depthwise_image(args)) return choose_depthwise_images(args, step);
  return choose_grouped(args, step);
}

void set_depthwise_use(ConvStep step, KernelUse use) {
  depthwise_use.at(static_cast<size_t>(step)) = use;
}

void set_grouped_use(KernelUse use) {
  grouped_use = use;
}

bool is_length_last(const Conv& args) {
  // A length of 1 is last in either layout.
  return is_depthwise_row(args) && args.input.size(2) > 1 && args.input.numel() > 0 &&
         args.input.is_contiguous();
}

}  // namespace cudnn_ops
