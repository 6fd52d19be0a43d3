// What a plan of a convolution bakes in.
#pragma once

#include "ops/conv/conv.h"

#include "graph/tensor_desc.h"

namespace cudnn_ops {

// Of two or three dimensions; the first two are all that the former has.
struct ConvGeometry {
  int64_t dims = 2;
  std::array<int64_t, 3> stride{}, before{}, behind{}, dilation{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    static constexpr const char* kNames[4][3] = {{"stride0", "stride1", "stride2"},
                                                 {"before0", "before1", "before2"},
                                                 {"behind0", "behind1", "behind2"},
                                                 {"dilation0", "dilation1", "dilation2"}};
    visit("dims", self.dims);
    for (size_t i = 0; i < 3; ++i) {
      visit(kNames[0][i], self.stride[i]);
      visit(kNames[1][i], self.before[i]);
      visit(kNames[2][i], self.behind[i]);
      visit(kNames[3][i], self.dilation[i]);
    }
  }
};

// Tensors have their channels last; the bias is [1, K, 1, 1]. What is of rank 0 is not there.
struct ConvParams {
  static constexpr const char* kName = "conv";
  graph::TensorDesc input, weight, bias, residual, before, out;
  ConvGeometry geometry;
  ConvActivation activation = ConvActivation::kNone;
  bool allow_tf32 = false, deterministic = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    visit("input", self.input);
    visit("weight", self.weight);
    visit("bias", self.bias);
    visit("residual", self.residual);
    visit("before", self.before);
    visit("out", self.out);
    ConvGeometry::fields(self.geometry, visit);
    visit("activation", self.activation);
    visit("allow_tf32", self.allow_tf32);
    visit("deterministic", self.deterministic);
  }
};

// The gradient of the input or that of the weight, from that of the convolution's result.
struct ConvBackwardParams {
  static constexpr const char* kName = "conv_backward";
  graph::TensorDesc input, weight, grad;
  ConvGeometry geometry;
  bool is_of_weight = false;
  bool allow_tf32 = false, deterministic = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    visit("input", self.input);
    visit("weight", self.weight);
    visit("grad", self.grad);
    ConvGeometry::fields(self.geometry, visit);
    visit("is_of_weight", self.is_of_weight);
    visit("allow_tf32", self.allow_tf32);
    visit("deterministic", self.deterministic);
  }
};

}  // namespace cudnn_ops
