// What a plan of a convolution bakes in: its key.
#pragma once

#include "graph/tensor_desc.h"
#include "kernels/conv_epilogue.h"

namespace cudnn_ops {

// ConvGeometry as cuDNN has it: two or three dimensions, the groups in the weight's size. Two
// dimensions have the first two numbers.
struct ConvSteps {
  int64_t dims = 2;
  std::array<int64_t, 3> stride{}, before{}, after{}, dilation{};

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    static constexpr const char* kNames[4][3] = {{"stride0", "stride1", "stride2"},
                                                 {"before0", "before1", "before2"},
                                                 {"after0", "after1", "after2"},
                                                 {"dilation0", "dilation1", "dilation2"}};
    visit("dims", self.dims);
    for (size_t i = 0; i < 3; ++i) {
      visit(kNames[0][i], self.stride[i]);
      visit(kNames[1][i], self.before[i]);
      visit(kNames[2][i], self.after[i]);
      visit(kNames[3][i], self.dilation[i]);
    }
  }
};

// Tensors have their channels last; the bias is [1, K, 1, 1]. A tensor of rank 0 is absent.
struct ConvParams {
  static constexpr const char* kName = "conv";
  graph::TensorDesc input, weight, bias, residual, before, out;
  ConvSteps steps;
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
    ConvSteps::fields(self.steps, visit);
    visit("activation", self.activation);
    visit("allow_tf32", self.allow_tf32);
    visit("deterministic", self.deterministic);
  }
};

// The gradient of the input or that of the weight, from that of the convolution's result.
struct ConvBackwardParams {
  static constexpr const char* kName = "conv_backward";
  graph::TensorDesc input, weight, grad;
  ConvSteps steps;
  bool is_of_weight = false;
  bool allow_tf32 = false, deterministic = false;

  template <class Self, class Visitor>
  static void fields(Self& self, Visitor&& visit) {
    visit("input", self.input);
    visit("weight", self.weight);
    visit("grad", self.grad);
    ConvSteps::fields(self.steps, visit);
    visit("is_of_weight", self.is_of_weight);
    visit("allow_tf32", self.allow_tf32);
    visit("deterministic", self.deterministic);
  }
};

}  // namespace cudnn_ops
