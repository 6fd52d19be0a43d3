// Activations as nodes of cuDNN's graphs. Only *_graph.cpp include this: it brings the frontend.
#pragma once

#include "graph/error.h"
#include "graph/frontend.h"
#include "kernels/activation.h"

namespace cudnn_ops {

// Throws NotSupported where cuDNN has none that runs.
inline cudnn_frontend::graph::Pointwise_attributes activation_node(Activation activation) {
  using Mode = cudnn_frontend::PointwiseMode_t;
  const auto of_mode = [](Mode mode) {
    return cudnn_frontend::graph::Pointwise_attributes().set_name("activation").set_mode(mode);
  };
  switch (activation) {
    case Activation::kNone: return of_mode(Mode::IDENTITY);
    case Activation::kRelu: return of_mode(Mode::RELU_FWD);
    case Activation::kSilu: return of_mode(Mode::SWISH_FWD);
    case Activation::kGelu: return of_mode(Mode::GELU_FWD);
    case Activation::kGeluTanh: return of_mode(Mode::GELU_APPROX_TANH_FWD);
    case Activation::kLeakyRelu: return of_mode(Mode::RELU_FWD).set_relu_lower_clip_slope(0.01f);
    // With an upper clip cuDNN 9.19 builds plans that do not execute (measured on an H200).
    case Activation::kRelu6:
    case Activation::kHardSwish:
    case Activation::kSlope: break;
  }
  throw graph::NotSupported("cuDNN's graphs have no such activation");
}

// Of a gradient and of what the activation is of; of ReLU its result serves too. Or of the slope.
inline cudnn_frontend::graph::Pointwise_attributes activation_gradient_node(Activation activation) {
  using Mode = cudnn_frontend::PointwiseMode_t;
  const auto of_mode = [](Mode mode) {
    return cudnn_frontend::graph::Pointwise_attributes()
        .set_name("activation_gradient")
        .set_mode(mode);
  };
  switch (activation) {
    case Activation::kRelu: return of_mode(Mode::RELU_BWD);
    case Activation::kSilu: return of_mode(Mode::SWISH_BWD);
    case Activation::kGelu: return of_mode(Mode::GELU_BWD);
    case Activation::kGeluTanh: return of_mode(Mode::GELU_APPROX_TANH_BWD);
    case Activation::kSlope: return of_mode(Mode::MUL);
    default: throw graph::NotSupported("cuDNN's graphs have no gradient of such an activation");
  }
}

}  // namespace cudnn_ops
