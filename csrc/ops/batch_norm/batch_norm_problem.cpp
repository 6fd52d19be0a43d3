#include "ops/batch_norm/batch_norm_problem.h"

#include "ops/image_order.h"

#include "graph/image_desc.h"

#include <ATen/Context.h>
#include <ATen/core/DimVector.h>

#include <limits>

namespace cudnn_ops {
namespace {

// cuDNN's engines load whole vectors and do not check. A vector of float32 parameters, of four
// numbers, was seen to be read at an address that is no multiple of 16 where the tensor began at
// one (pytorch issue 195186, batchnorm_fwtr_nhwc_semiPersist): so each tensor of a plan begins at a
// multiple of 16, and each of those for channels is an allocation of its own, never a row of a
// larger one. Images are read by eight channels.
constexpr int64_t kVector = 8;
// A mask has a bit a number: with these channels each pixel's bits begin at a multiple of 8 bytes,
// as wide as an engine could load them for a block of channels.
constexpr int64_t kMaskVector = 64;

at::DimVector image_sizes(const at::Tensor& input) {
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  while (sizes.size() < 4) sizes.insert(sizes.begin() + 2, 1);
  return sizes;
}

graph::TensorDesc image_desc(const at::Tensor& input) {
  return graph::channels_last_desc(input.scalar_type(), image_sizes(input));
}

}  // namespace

std::string_view reason_without_plan(const at::Tensor& input, bool training) {
  if (!training) {
    return "a kernel of ours norms by running statistics in one pass: cuDNN has no engine for it";
  }
  if (input.scalar_type() != at::kHalf && input.scalar_type() != at::kBFloat16) {
    return "kernels of torch and ours run: cuDNN's engines are used for float16 and bfloat16";
  }
  if (input.dim() > graph::TensorDesc::kMaxRank) {
    return "kernels of torch and ours run: cuDNN's images have at most three dimensions";
  }
  if (input.size(1) % kVector != 0) {
    return "kernels of torch and ours run: cuDNN's engines require a multiple of 8 channels";
  }
  if (!is_image_channels_last(input) && !has_one_position(input)) {
    return "kernels of torch and ours run: cuDNN's engines require the channels last in memory";
  }
  if (input.numel() > std::numeric_limits<int32_t>::max()) {
    return "kernels of torch and ours run: cuDNN's engines count in 32 bits";
  }
  if (at::globalContext().deterministicAlgorithms()) {
    return "kernels of torch and ours run, which are deterministic";
  }
  return {};
}

std::string_view reason_without_plan(const BatchNorm& args, bool training) {
  const auto reason = reason_without_plan(args.input, training);
  if (reason.empty() && args.residual && !args.has_relu()) {
    return "kernels of torch and ours run: cuDNN's engines add a residual only before a ReLU";
  }
  return reason;
}

bool takes_mask(const at::Tensor& input) {
  return input.size(1) % kMaskVector == 0;
}

BatchNormParams batch_norm_params(const BatchNorm& args) {
  return {image_desc(args.input), args.running_mean.has_value(), args.residual.has_value(),
          args.has_relu()};
}

BatchNormBackwardParams batch_norm_backward_params(const at::Tensor& input, bool has_mask,
                                                   bool has_masked) {
  return {image_desc(input), has_mask, has_masked};
}

}  // namespace cudnn_ops
