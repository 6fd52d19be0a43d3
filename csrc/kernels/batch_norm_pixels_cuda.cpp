#include "kernels/batch_norm_pixels.h"

#include "batch_norm_pixels_images.h"
#include "kernels/batch_norm_pixels_call.h"
#include "kernels/device_kernel.h"
#include "kernels/row_tiling.h"

#include <ATen/cuda/EmptyTensor.h>

#include <string>

namespace cudnn_ops {
namespace {

constexpr int64_t kStrip = 32;  // channels of a block that joins stretches
constexpr int kJoiners = 1024;  // its threads

// A kernel of batch_norm_pixels.cu for a type, by a name that ends with it.
class Kernel {
 public:
  explicit Kernel(const std::string& name)
      : names_{"batch_norm_" + name + "_half", "batch_norm_" + name + "_bfloat16",
               "batch_norm_" + name + "_float"},
        kernels_{{kBatchNormPixelsImages, names_[0].c_str(), true},
                 {kBatchNormPixelsImages, names_[1].c_str(), true},
                 {kBatchNormPixelsImages, names_[2].c_str(), true}} {
  }
  const DeviceKernel& of(const at::Tensor& image) const {
    return kernels_[type_index(image.scalar_type())];
  }

 private:
  std::string names_[3];
  DeviceKernel kernels_[3];
};

// How the images lie before the blocks of a kernel.
struct Spread {
  BatchNormPixels pixels;
  int64_t strips;
  int threads;

  Spread(const at::Tensor& image, const DeviceKernel& kernel) {
    const int64_t channels = image.size(1), rows = image.numel() / channels;
    const RowTiling tiling(channels, kPixelBytes / image.element_size());
    const int64_t resident = kernel.resident_blocks(tiling.threads, 0);
    const int64_t stretches = tiling.stretches(rows, resident, /*least_turns=*/1);
    const int64_t left = rows % (stretches * tiling.rows_at_once);
    pixels = {static_cast<unsigned>(channels),
              static_cast<unsigned>(tiling.pieces),
              static_cast<unsigned>(stretches),
              rows,
              static_cast<float>(rows / (stretches * tiling.rows_at_once)),
              static_cast<unsigned>(left / tiling.rows_at_once),
              static_cast<unsigned>(left % tiling.rows_at_once)};
    strips = tiling.strips;
    threads = tiling.threads;
  }
  void launch(const DeviceKernel& kernel, void* argument) const {
    kernel.launch(strips, static_cast<int>(pixels.stretches), threads, &argument);
  }
};

at::Tensor numbers(int64_t count, const at::Tensor& image) {
  return at::detail::empty_cuda({count}, at::kFloat, image.device(), std::nullopt);
}

BatchNormVector vector_of(const std::optional<at::Tensor>& vector) {
  if (!vector) return {nullptr, false};
  return {vector->const_data_ptr(), vector->scalar_type() == at::kFloat};
}

BatchNormOutVector written(const at::Tensor& vector) {
  if (!vector.defined()) return {nullptr, false};
  return {vector.mutable_data_ptr(), vector.scalar_type() == at::kFloat};
}

}  // namespace

void batch_norm_find_stats(const BatchNormStats& args, const at::Tensor& mean,
                           const at::Tensor& rstd) {
  static const Kernel find("stats"), finish("finish_stats");
  const auto& input = args.input;
  const Spread spread(input, find.of(input));
  const int64_t channels = input.size(1);
  const at::Tensor partial = numbers(2 * spread.pixels.stretches * channels, input);
  BatchNormStatsCall call{};
  call.input = input.const_data_ptr();
  call.partial = partial.mutable_data_ptr<float>();
  call.mean = mean.mutable_data_ptr<float>();
  call.rstd = rstd.mutable_data_ptr<float>();
  call.running_mean = written(args.running_mean.value_or(at::Tensor()));
  call.running_var = written(args.running_var.value_or(at::Tensor()));
  call.eps = static_cast<float>(args.eps);
  call.momentum = static_cast<float>(args.momentum);
  call.pixels = spread.pixels;
  spread.launch(find.of(input), &call);
  void* argument = &call;
  finish.of(input).launch(divide_up(channels, kStrip), 1, kJoiners, &argument);
}

void batch_norm_find_gradients(const BatchNormSlope& args) {
  static const Kernel finish("finish_sums"), sums_of_two("sums_of_two");
  static const Kernel sums[3] = {Kernel("sums_none"), Kernel("sums_of_input"),
                                 Kernel("sums_of_out")};
  static const Kernel gradients[3] = {Kernel("gradient_none"), Kernel("gradient_of_input"),
                                      Kernel("gradient_of_out")};
  const auto& input = args.input;
  const int64_t channels = input.size(1);
  const int relu = !args.has_relu ? 0 : args.out ? 2 : 1;
  const auto& add_up = (args.grad_more ? sums_of_two : sums[relu]).of(input);
  const Spread spread(input, add_up);
  const at::Tensor partial = numbers(2 * spread.pixels.stretches * channels, input);
  const at::Tensor joined = numbers(2 * channels, input);
  BatchNormGradientCall call{};
  call.grad = args.grad_out.const_data_ptr();
  if (args.grad_more) call.more = args.grad_more->const_data_ptr();
  call.input = input.const_data_ptr();
  if (args.out) call.out = args.out->const_data_ptr();
  call.mean = args.mean.const_data_ptr<float>();
  call.rstd = args.rstd.const_data_ptr<float>();
  call.weight = vector_of(args.weight);
  call.bias = vector_of(args.bias);
  call.partial = partial.mutable_data_ptr<float>();
  call.sums = joined.mutable_data_ptr<float>();
  if (args.masked.defined()) call.masked = args.masked.mutable_data_ptr();
  call.grad_weight = written(args.grad_weight);
  call.grad_bias = written(args.grad_bias);
  call.pixels = spread.pixels;
  spread.launch(add_up, &call);
  void* argument = &call;
  finish.of(input).launch(divide_up(2 * channels, kStrip), 1, kJoiners, &argument);
  if (!args.grad_input.defined()) return;
  call.grad_input = args.grad_input.mutable_data_ptr();
  // What came through the ReLU is there already where it is wanted.
  if (call.masked != nullptr) call.grad = call.masked;
  const auto& find = gradients[call.masked != nullptr ? 0 : relu].of(input);
  const Spread of_gradient(input, find);
  call.pixels = of_gradient.pixels;
  of_gradient.launch(find, &call);
}

}  // namespace cudnn_ops
