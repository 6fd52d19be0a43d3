// Transposed convolutions with their epilogue. They are convolutions of another geometry
// (ConvGeometry): the operators are the same, cudnn_ops::_conv and its backward.
//
// What a transposed convolution computes of its input is what a convolution with the same weight
// computes of its result's gradient, for its input: that convolution is called its mirror here, and
// leads from the transposed one's output back to its input.
#pragma once

#include "ops/conv/conv.h"

namespace cudnn_ops {

// cudnn_ops::_conv_transpose1d to 3d, which Python's functions call.
template <int64_t dims>
at::Tensor packed_conv_transpose(const at::Tensor& input, const at::Tensor& weight,
                                 const OptionalTensor& bias, at::IntArrayRef numbers,
                                 std::string_view activation, const OptionalTensor& residual);

const char* transpose_name(int64_t dims);
at::SymDimVector conv_transpose_output_sizes(const Conv& args);

// Of the channels; and of a dimension, whose numbers are known to have the right signs.
void check_transposed_fit(const Conv& args);
void check_transposed_size(const Conv& args, size_t dim);

// The mirror, without an epilogue; `output` is what it is of, or like that.
Conv mirror_of(const Conv& args, const at::Tensor& output);
// Likewise, of a tensor that has no memory.
Conv mirror_of(const Conv& args);

// Whether the output is so long that the mirror, whose last steps are cut off, leads to more than
// the input: torch's own kernel runs then.
bool has_no_mirror(const Conv& args);

// What that kernel computes, as images with their channels last; of a gradient's, that of the input
// or that of the weight.
at::Tensor transpose_by_torch(const Conv& args);
at::Tensor transposed_gradient_by_torch(const Conv& args, const at::Tensor& of_out,
                                        bool is_of_weight);

}  // namespace cudnn_ops
