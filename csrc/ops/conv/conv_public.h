// The arguments of the public convolutions, whose names are made of the number of dimensions.
#pragma once

#include "ops/conv/conv.h"

#include <string_view>

namespace cudnn_ops {

using ConvNumbers = c10::SmallVector<int64_t, 3>;  // one for all dimensions, or one for each

// conv1d and its like. `Padding`: ConvNumbers, or a name (std::string_view), as an overload has it.
template <class Padding>
struct PublicConv {
  at::Tensor input, weight;
  OptionalTensor bias;
  ConvNumbers stride;
  Padding padding;
  ConvNumbers dilation;
  int64_t groups = 1;
  std::string_view activation;
  OptionalTensor residual;

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.input, self.weight, self.bias, self.stride, self.padding, self.dilation,
                    self.groups, self.activation, self.residual);
  }
};

// _conv1d and its like, which Python calls: stride, padding, dilation and groups in one list.
struct PackedConv {
  at::Tensor input, weight;
  OptionalTensor bias;
  c10::SmallVector<int64_t, 13> numbers;
  std::string_view activation;
  OptionalTensor residual;

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.input, self.weight, self.bias, self.numbers, self.activation,
                    self.residual);
  }
};

}  // namespace cudnn_ops
