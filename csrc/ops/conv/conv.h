// Convolutions with their epilogue, act(conv(input, weight) + bias + residual): what their files
// share. See cudnn_ops/ops/conv.py for the meaning of the arguments.
#pragma once

#include "ops/attention/dense/sdpa.h"

#include "kernels/activation_list.h"

#include <ATen/core/DimVector.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <string_view>

namespace cudnn_ops {

#define CUDNN_OPS_ENUMERATOR(name, Name) k##Name,
enum class ConvActivation : int64_t { CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_ENUMERATOR) };
#undef CUDNN_OPS_ENUMERATOR

// What users call them, by their number.
#define CUDNN_OPS_NAME(name, Name) std::string_view(#name),
inline constexpr std::array kConvActivations{CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_NAME)};
#undef CUDNN_OPS_NAME

// Of an activation that came as a number, as _conv's schema has it.
ConvActivation conv_activation(int64_t number);

// The arguments of a call, in the order of the schema of cudnn_ops::_conv; of one to three
// dimensions.
struct Conv {
  const at::Tensor &input, &weight;
  const OptionalTensor &bias, &residual;
  // Of each dimension the stride, then of each the zeros before it, those behind it, the dilation;
  // then the groups. One list, because Python takes half a microsecond to hand over each.
  c10::IntArrayRef geometry;
  ConvActivation activation;

  size_t dims() const {
    return geometry.size() / 4;
  }
  int64_t stride(size_t dim) const {
    return geometry[dim];
  }
  int64_t before(size_t dim) const {
    return geometry[dims() + dim];
  }
  int64_t behind(size_t dim) const {
    return geometry[2 * dims() + dim];
  }
  int64_t dilation(size_t dim) const {
    return geometry[3 * dims() + dim];
  }
  int64_t groups() const {
    return geometry.back();
  }
  // The operator that was called, for messages.
  const char* op() const;
};
// `geometry` of such a call.
using ConvNumbers = c10::SmallVector<int64_t, 13>;

// The output, and what the activation is of, [0] where nobody asked for it. Both have the channels
// last in memory, as gradients of inputs have.
using ConvResults = std::tuple<at::Tensor, at::Tensor>;
// Of input, weight, bias and residual; [0] where they are not asked for.
using ConvGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Whether the derivative of the activation is computed from what it is of, or from the output.
inline bool needs_before(ConvActivation activation) {
  return activation != ConvActivation::kNone && activation != ConvActivation::kRelu;
}

void check_conv(const Conv& args);
// And what the backward is given beside them.
void check_conv_backward(const Conv& args, const at::Tensor& grad_out, const OptionalTensor& saved);
at::SymDimVector conv_output_sizes(const Conv& args);
at::MemoryFormat channels_last(const at::Tensor& tensor);  // of two or three dimensions

using ConvOp = ConvResults(const at::Tensor& input, const at::Tensor& weight,
                           const OptionalTensor& bias, const OptionalTensor& residual,
                           c10::IntArrayRef geometry, int64_t activation, bool with_before);
// `saved` is what the activation is of, or the output: as needs_before() says.
using ConvBackwardOp = ConvGradients(const at::Tensor& grad_out, const at::Tensor& input,
                                     const at::Tensor& weight, const OptionalTensor& saved,
                                     c10::IntArrayRef geometry, int64_t activation,
                                     std::array<bool, 4> output_mask);
const c10::TypedOperatorHandle<ConvOp>& conv_op();
const c10::TypedOperatorHandle<ConvBackwardOp>& conv_backward_op();

}  // namespace cudnn_ops
