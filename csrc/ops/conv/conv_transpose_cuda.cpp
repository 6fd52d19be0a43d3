// Transposed convolutions that cuDNN's gradients do not make, by torch.

#include "ops/conv/conv_transpose.h"
#include "ops/only_kernels.h"

#include "graph/tensor_desc.h"

#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

namespace cudnn_ops {
namespace {

// What torch is called with where there is no mirror (conv_transpose.h): in float32, for its kernel
// adds up numbers of the input's type.
struct TorchSteps {
  at::DimVector stride, padding, dilation, output_padding;

  explicit TorchSteps(const ConvGeometry& geometry) {
    for (size_t dim = 0; dim < geometry.dims(); ++dim) {
      stride.push_back(geometry.stride(dim));
      padding.push_back(geometry.before(dim));
      dilation.push_back(geometry.dilation(dim));
      output_padding.push_back(geometry.output_padding(dim));
    }
  }
};

// With its channels last.
at::Tensor image_in(at::ScalarType dtype, const at::Tensor& tensor, const Conv& args) {
  const at::Tensor image = args.dims() == 1 ? tensor.unsqueeze(2) : tensor;
  at::Tensor result =
      at::detail::empty_cuda(image.sizes(), dtype, image.device(), graph::channels_last(image));
  return result.copy_(image);
}

}  // namespace

at::Tensor transpose_by_torch(const Conv& args) {
  const OnlyKernels guard;
  const TorchSteps steps(args.geometry);
  const at::Tensor out =
      at::convolution(args.input.to(at::kFloat), args.weight.to(at::kFloat), /*bias=*/{},
                      steps.stride, steps.padding, steps.dilation, /*transposed=*/true,
                      steps.output_padding, args.geometry.groups());
  return image_in(args.input.scalar_type(), out, args);
}

at::Tensor transposed_gradient_by_torch(const Conv& args, const at::Tensor& of_out,
                                        bool is_of_weight) {
  const OnlyKernels guard;
  const TorchSteps steps(args.geometry);
  const auto [of_input, of_weight, none] = at::convolution_backward(
      of_out.to(at::kFloat), args.input.to(at::kFloat), args.weight.to(at::kFloat),
      /*bias_sizes=*/{}, steps.stride, steps.padding, steps.dilation, /*transposed=*/true,
      steps.output_padding, args.geometry.groups(), {!is_of_weight, is_of_weight, false});
  return image_in(args.input.scalar_type(), is_of_weight ? of_weight : of_input, args);
}

}  // namespace cudnn_ops
