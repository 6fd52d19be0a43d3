#include "ops/batch_norm/batch_norm_problem.h"

#include "ops/image_order.h"

#include "graph/image_desc.h"
#include "kernels/batch_norm_pixels.h"

#include <ATen/Context.h>
#include <ATen/core/DimVector.h>

#include <limits>

namespace cudnn_ops {
namespace {

// cuDNN's engines load whole vectors and do not check. A vector of float32 parameters, of four
// numbers, was seen to be read at an address that is no multiple of 16 where the tensor began at
// one (pytorch issue 195186, batchnorm_fwtr_nhwc_semiPersist): so each tensor of a plan begins at a
// multiple of 16, and each of those for channels is an allocation of its own, never a row of a
// larger one.
// The numbers of channels for which they are faster than kernels of ours.
constexpr int64_t kPlanChannels = 64;

at::DimVector image_sizes(const at::Tensor& input) {
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  while (sizes.size() < 4) sizes.insert(sizes.begin() + 2, 1);
  return sizes;
}

graph::TensorDesc image_desc(const at::Tensor& input) {
  return graph::channels_last_desc(input.scalar_type(), image_sizes(input));
}

// Whether kernels of ours know the dtype, and load whole pieces of a pixel.
bool has_whole_pieces(const at::Tensor& input) {
  const auto channels = input.sym_size(1).maybe_as_int();
  return input.scalar_type() != at::kDouble && channels &&
         *channels * static_cast<int64_t>(input.element_size()) % kPixelBytes == 0;
}

}  // namespace

bool has_pixel_kernels(const at::Tensor& input) {
  return has_whole_pieces(input) && (is_image_channels_last(input) || has_one_position(input));
}

bool is_relu_of_input(const BatchNorm& args, bool training) {
  const auto& input = args.input;
  if (!training || !args.has_relu() || args.residual || !input.is_cuda()) return false;
  // Of sizes that are symbols, only this is known of the order of memory.
  const bool is_last = input.dim() == 4   ? input.is_contiguous(at::MemoryFormat::ChannelsLast)
                       : input.dim() == 5 ? input.is_contiguous(at::MemoryFormat::ChannelsLast3d)
                                          : input.dim() == 2 && input.is_contiguous();
  return is_last && has_whole_pieces(input);
}

std::string_view reason_without_plan(const at::Tensor& input, bool training, bool has_more) {
  if (!training) {
    return "a kernel of ours norms by running statistics in one pass: cuDNN has no engine for it";
  }
  if (!is_image_channels_last(input) && !has_one_position(input)) {
    return "kernels of torch and ours run: others require the channels last in memory";
  }
  if (!has_pixel_kernels(input)) {
    return "kernels of torch and ours run: others require a multiple of 8 channels, of 4 in "
           "float32";
  }
  if (has_more) {
    return "kernels of ours run: with a sum or a ReLU they are faster than cuDNN's engines";
  }
  if (input.scalar_type() == at::kFloat) {
    return "kernels of ours run: cuDNN's engines are used for float16 and bfloat16";
  }
  if (input.dim() > graph::TensorDesc::kMaxRank) {
    return "kernels of ours run: cuDNN's images have at most three dimensions";
  }
  if (input.size(1) % kPlanChannels != 0 || has_one_position(input)) {
    return "kernels of ours run: cuDNN's engines are faster for images of a multiple of 64 "
           "channels alone";
  }
  if (input.numel() > std::numeric_limits<int32_t>::max()) {
    return "kernels of ours run: cuDNN's engines count in 32 bits";
  }
  if (at::globalContext().deterministicAlgorithms()) {
    return "kernels of ours run, which are deterministic";
  }
  return {};
}

BatchNormParams batch_norm_params(const BatchNorm& args) {
  return {image_desc(args.input), args.running_mean.has_value()};
}

BatchNormBackwardParams batch_norm_backward_params(const at::Tensor& input) {
  return {image_desc(input)};
}

}  // namespace cudnn_ops
