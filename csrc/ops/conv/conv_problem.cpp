#include "ops/conv/conv_problem.h"

#include "ops/conv/conv_choice.h"

#include "graph/plan_key.h"

#include <ATen/Context.h>
#include <ATen/core/DimVector.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// cuDNN tells the layout by all strides, those of dimensions of size 1 too.
TensorDesc channels_last_desc(c10::ScalarType dtype, c10::IntArrayRef sizes) {
  TensorDesc desc;
  desc.dtype = dtype;
  desc.rank = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), desc.sizes.begin());
  desc.strides[1] = 1;
  int64_t stride = sizes[1];
  for (size_t dim = sizes.size() - 1; dim > 1; --dim) {
    desc.strides[dim] = stride;
    stride *= sizes[dim];
  }
  desc.strides[0] = stride;
  return desc;
}

// As numbers, with a row where there is one dimension: cuDNN's convolutions have two or three.
at::DimVector image_sizes(c10::SymIntArrayRef sizes) {
  at::DimVector result;
  for (const auto& size : sizes) result.push_back(size.expect_int());
  if (result.size() == 3) result.insert(result.begin() + 2, 1);
  return result;
}

TensorDesc desc_of(const at::Tensor& tensor) {
  return channels_last_desc(tensor.scalar_type(), image_sizes(tensor.sym_sizes()));
}

ConvGeometry geometry_of(const Conv& args) {
  ConvGeometry geometry;
  const size_t rows = args.dims() == 1 ? 1 : 0;
  geometry.dims = static_cast<int64_t>(rows + args.dims());
  geometry.stride[0] = geometry.dilation[0] = 1;
  for (size_t dim = 0; dim < args.dims(); ++dim) {
    geometry.stride[rows + dim] = args.stride(dim);
    geometry.before[rows + dim] = args.before(dim);
    geometry.behind[rows + dim] = args.behind(dim);
    geometry.dilation[rows + dim] = args.dilation(dim);
  }
  return geometry;
}

// Of other dtypes it makes no difference.
bool allows_tf32(const at::Tensor& input) {
  return input.scalar_type() == at::kFloat &&
         at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
}

bool is_deterministic() {
  return at::globalContext().deterministicCuDNN() || at::globalContext().deterministicAlgorithms();
}

std::vector<int64_t> plan_key(const at::Tensor& input, const at::Tensor& weight,
                              const OptionalTensor& bias, const OptionalTensor& residual,
                              c10::IntArrayRef geometry, int64_t activation, int64_t fusion,
                              bool with_before) {
  const Conv args{input, weight, bias, residual, geometry, conv_activation(activation)};
  check_conv(args);
  const auto params = conv_params(args, static_cast<ConvFusion>(fusion), with_before);
  return graph::PlanKey::of(params, 0).words().vec();
}

// Why a plan with `fusion` of the epilogue is not tried; empty where it is.
std::string bare_reason(const at::Tensor& input, const at::Tensor& weight,
                        const OptionalTensor& bias, const OptionalTensor& residual,
                        c10::IntArrayRef geometry, int64_t activation, int64_t fusion) {
  const Conv args{input, weight, bias, residual, geometry, conv_activation(activation)};
  check_conv(args);
  const auto params = conv_params(args, static_cast<ConvFusion>(fusion), false);
  return std::string(reason_for_bare(params));
}

// Why torch's kernel runs, and no plan; empty where a plan does. `step` is a ConvStep.
std::string torch_reason(const at::Tensor& input, const at::Tensor& weight,
                         c10::IntArrayRef geometry, int64_t step) {
  const OptionalTensor none;
  const Conv args{input, weight, none, none, geometry, ConvActivation::kNone};
  check_conv(args);
  return std::string(reason_for_torch(args, static_cast<ConvStep>(step)));
}

std::vector<int64_t> backward_plan_key(const at::Tensor& input, const at::Tensor& weight,
                                       c10::IntArrayRef geometry, bool is_of_weight) {
  const OptionalTensor none;
  const Conv args{input, weight, none, none, geometry, ConvActivation::kNone};
  check_conv(args);
  return graph::PlanKey::of(conv_backward_params(args, is_of_weight), 0).words().vec();
}

}  // namespace

ConvParams conv_params(const Conv& args, ConvFusion fusion, bool with_before) {
  ConvParams params;
  const auto sizes = image_sizes(conv_output_sizes(args));
  params.input = desc_of(args.input);
  params.weight = desc_of(args.weight);
  params.out = channels_last_desc(args.input.scalar_type(), sizes);
  params.geometry = geometry_of(args);
  params.allow_tf32 = allows_tf32(args.input);
  params.deterministic = is_deterministic();
  if (fusion == ConvFusion::kNone) return params;
  if (args.bias) {
    at::DimVector one(sizes.size(), 1);
    one[1] = sizes[1];
    params.bias = channels_last_desc(args.input.scalar_type(), one);
  }
  if (fusion == ConvFusion::kBias) return params;
  if (args.residual) params.residual = params.out;
  if (fusion == ConvFusion::kLinear) return params;
  params.activation = args.activation;
  if (with_before) params.before = params.out;
  return params;
}

ConvBackwardParams conv_backward_params(const Conv& args, bool is_of_weight) {
  ConvBackwardParams params;
  params.input = desc_of(args.input);
  params.weight = desc_of(args.weight);
  params.grad = channels_last_desc(args.input.scalar_type(), image_sizes(conv_output_sizes(args)));
  params.geometry = geometry_of(args);
  params.is_of_weight = is_of_weight;
  params.allow_tf32 = allows_tf32(args.input);
  params.deterministic = is_deterministic();
  return params;
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  m.def(
      "_conv_plan_key(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int[] geometry, int activation, int fusion, bool with_before) -> int[]",
      cudnn_ops::plan_key);
  m.def(
      "_conv_bare_reason(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int[] geometry, int activation, int fusion) -> str",
      cudnn_ops::bare_reason);
  m.def("_conv_torch_reason(Tensor input, Tensor weight, int[] geometry, int step) -> str",
        cudnn_ops::torch_reason);
  m.def(
      "_conv_backward_plan_key(Tensor input, Tensor weight, int[] geometry, bool is_of_weight) "
      "-> int[]",
      cudnn_ops::backward_plan_key);
}
