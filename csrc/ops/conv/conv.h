// Convolutions with their epilogue, act(conv(input, weight) + bias + residual), and transposed ones
// (conv_transpose.h): what their files share. See cudnn_ops/ops/conv.py and conv_transpose.py there
// for the meaning of the arguments.
#pragma once

#include "kernels/conv_epilogue.h"
#include "ops/operator.h"

#include <ATen/core/DimVector.h>

#include <array>

namespace cudnn_ops {

using ConvNumbers = c10::SmallVector<int64_t, 16>;

// The strides of all dimensions, the zeros before each, those after each, the dilations; and the
// groups. Schemas have one list, because Python needs half a microsecond to hand over each.
//
// A transposed convolution has the numbers of the convolution that leads back from its output, and
// before these, for each dimension, by how much the output is longer than the shortest from which
// that leads to the input: torch's output_padding.
struct ConvGeometry {
  ConvNumbers numbers;
  CUDNN_OPS_FIELDS(numbers)

  bool is_transposed() const {
    return numbers.size() % 4 != 1;
  }
  size_t dims() const {
    return numbers.size() / (is_transposed() ? 5 : 4);
  }
  int64_t output_padding(size_t dim) const {
    return is_transposed() ? numbers[dim] : 0;
  }
  int64_t stride(size_t dim) const {
    return of_kind(0)[dim];
  }
  int64_t before(size_t dim) const {
    return of_kind(1)[dim];
  }
  int64_t after(size_t dim) const {
    return of_kind(2)[dim];
  }
  int64_t dilation(size_t dim) const {
    return of_kind(3)[dim];
  }
  int64_t groups() const {
    return numbers.back();
  }

 private:
  const int64_t* of_kind(size_t kind) const {
    return numbers.data() + ((is_transposed() ? 1 : 0) + kind) * dims();
  }
};

// The arguments of a call, of one to three dimensions.
struct Conv {
  at::Tensor input, weight;
  OptionalTensor bias, residual;
  ConvGeometry geometry;
  int64_t activation = 0;  // a Activation
  CUDNN_OPS_FIELDS(input, weight, bias, residual, geometry, activation)
  size_t dims() const {
    return geometry.dims();
  }
  c10::SymInt out_channels() const {
    return geometry.is_transposed() ? weight.sym_size(1) * geometry.groups() : weight.sym_size(0);
  }
  Activation kind() const;  // ValueError where `activation` is none
  const char* op() const;   // the public operator's name, for messages
};

// cudnn_ops::_conv.
struct ConvForward {
  Conv conv;
  bool with_before = false;
  CUDNN_OPS_FIELDS(conv, with_before)
};

// What the backward reads of the forward.
struct ConvSaved {
  at::Tensor input, weight;
  OptionalTensor saved;  // the activation's input, or its output: as needs_before() says
  ConvGeometry geometry;
  int64_t activation = 0;
  CUDNN_OPS_FIELDS(input, weight, saved, geometry, activation)
  // The forward, as far as it is known.
  Conv conv() const {
    return {input, weight, /*bias=*/{}, /*residual=*/{}, geometry, activation};
  }
};

// cudnn_ops::_conv_backward_check.
struct ConvBackward {
  at::Tensor grad_out;
  ConvSaved forward;
  CUDNN_OPS_FIELDS(grad_out, forward)
};

// cudnn_ops::_conv_backward.
struct ConvMaskedBackward {
  ConvBackward backward;
  std::array<bool, 4> output_mask{};
  CUDNN_OPS_FIELDS(backward, output_mask)
};

// The output, and the activation's input, [0] where nobody asks for it. Both have the channels last
// in memory, or the length (is_length_last), as gradients of inputs have.
using ConvResults = std::tuple<at::Tensor, at::Tensor>;
// Of input, weight, bias and residual; [0] where nobody asks for it.
using ConvGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Whether the derivative of the activation is computed from its input, or from its output.
inline bool needs_before(Activation activation) {
  return activation != Activation::kNone && activation != Activation::kRelu;
}

// cudnn_ops::_conv1d to 3d, which Python's functions call.
template <int64_t dims>
at::Tensor packed_conv(const at::Tensor& input, const at::Tensor& weight,
                       const OptionalTensor& bias, at::IntArrayRef numbers,
                       std::string_view activation, const OptionalTensor& residual);

void check_conv(const Conv& args);
void check_conv_backward(const ConvBackward& args);
at::SymDimVector conv_output_sizes(const Conv& args);

const Operator<ConvResults, ConvForward>& conv_op();
// Calls it, cast as autocast says.
at::Tensor conv(const Conv& given);

}  // namespace cudnn_ops
