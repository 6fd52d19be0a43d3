// The activations that end a convolution or a matrix product, in the order in which schemas count
// them: what has one case for each is made of this list. X(name for users and kernels, name for
// C++).
#pragma once

#define CUDNN_OPS_ACTIVATIONS(X) \
  X(none, None)                  \
  X(relu, Relu)                  \
  X(silu, Silu)                  \
  X(gelu, Gelu)                  \
  X(gelu_tanh, GeluTanh)         \
  X(relu6, Relu6)                \
  X(hardswish, HardSwish)        \
  X(leaky_relu, LeakyRelu)

// What a gradient is multiplied with: the slope of one of these, or a slope that was kept.
#define CUDNN_OPS_SLOPES(X) CUDNN_OPS_ACTIVATIONS(X) X(slope, Slope)
