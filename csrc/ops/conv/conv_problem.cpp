#include "ops/conv/conv_problem.h"

#include "graph/image_desc.h"

#include <ATen/Context.h>
#include <ATen/core/DimVector.h>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// As integers, and with a dimension of size 1 before a single one: cuDNN's convolutions have two or
// three.
at::DimVector image_sizes(c10::SymIntArrayRef sizes) {
  at::DimVector result;
  for (const auto& size : sizes) result.push_back(size.expect_int());
  if (result.size() == 3) result.insert(result.begin() + 2, 1);
  return result;
}

TensorDesc desc_of(const at::Tensor& tensor) {
  return graph::channels_last_desc(tensor.scalar_type(), image_sizes(tensor.sym_sizes()));
}

ConvSteps steps_of(const ConvGeometry& geometry) {
  ConvSteps steps;
  const size_t rows = geometry.dims() == 1 ? 1 : 0;
  steps.dims = static_cast<int64_t>(rows + geometry.dims());
  steps.stride[0] = steps.dilation[0] = 1;
  for (size_t dim = 0; dim < geometry.dims(); ++dim) {
    steps.stride[rows + dim] = geometry.stride(dim);
    steps.before[rows + dim] = geometry.before(dim);
    steps.after[rows + dim] = geometry.after(dim);
    steps.dilation[rows + dim] = geometry.dilation(dim);
  }
  return steps;
}

// False for other dtypes, which it does not concern.
bool allows_tf32(const at::Tensor& input) {
  return input.scalar_type() == at::kFloat &&
         at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
}

bool is_deterministic() {
  return at::globalContext().deterministicCuDNN() || at::globalContext().deterministicAlgorithms();
}

}  // namespace

ConvParams conv_params(const Conv& args, ConvFusion fusion, bool with_before) {
  ConvParams params;
  const auto sizes = image_sizes(conv_output_sizes(args));
  params.input = desc_of(args.input);
  params.weight = desc_of(args.weight);
  params.out = graph::channels_last_desc(args.input.scalar_type(), sizes);
  params.steps = steps_of(args.geometry);
  params.is_transposed = args.geometry.is_transposed();
  params.allow_tf32 = allows_tf32(args.input);
  params.deterministic = is_deterministic();
  if (fusion == ConvFusion::kNone) return params;
  if (args.bias) {
    at::DimVector one(sizes.size(), 1);
    one[1] = sizes[1];
    params.bias = graph::channels_last_desc(args.input.scalar_type(), one);
  }
  if (fusion == ConvFusion::kBias) return params;
  if (args.residual) params.residual = params.out;
  if (fusion == ConvFusion::kLinear) return params;
  params.activation = args.kind();
  if (with_before) params.before = params.out;
  return params;
}

ConvBackwardParams conv_backward_params(const Conv& args, bool is_of_weight) {
  ConvBackwardParams params;
  params.input = desc_of(args.input);
  params.weight = desc_of(args.weight);
  params.grad =
      graph::channels_last_desc(args.input.scalar_type(), image_sizes(conv_output_sizes(args)));
  params.steps = steps_of(args.geometry);
  params.is_of_weight = is_of_weight;
  params.allow_tf32 = allows_tf32(args.input);
  params.deterministic = is_deterministic();
  return params;
}

}  // namespace cudnn_ops
