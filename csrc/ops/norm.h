// Layer norm and RMS norm: what their files share. See cudnn_ops/ops/norm.py for the meaning of the
// arguments.
#pragma once

#include "sdpa.h"

#include <c10/core/SymInt.h>

#include <array>

namespace cudnn_ops {

// The arguments of a call, in the order of the schema of cudnn_ops::_norm.
struct Norm {
  const at::Tensor& input;
  c10::SymIntArrayRef normalized_shape;
  const OptionalTensor &weight, &bias;
  double eps;
  bool is_layer;       // less the mean, and with a bias; else RMS norm
  bool zero_centered;  // the factor is the weight and 1
};

// The output, and what the backward needs of each row, float32 [rows] (float64 for float64 inputs);
// of RMS norm no mean. [0] where they are not asked for.
using OutAndStats = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
// Of input, weight and bias; [0] where they are not asked for.
using NormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

const char* name_of(const Norm& args);
void check_norm(const Norm& args);

const c10::TypedOperatorHandle<OutAndStats(const at::Tensor&, c10::SymIntArrayRef,
                                           const OptionalTensor&, const OptionalTensor&, double,
                                           bool, bool, bool)>&
norm_op();
const c10::TypedOperatorHandle<
    NormGradients(const at::Tensor&, const at::Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                  const at::Tensor&, const at::Tensor&, bool, bool, std::array<bool, 3>)>&
norm_backward_op();

}  // namespace cudnn_ops
