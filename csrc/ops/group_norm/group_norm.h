// Group norm, with a sum before it and an activation behind it: what its files share. See
// cudnn_ops/ops/group_norm.py for the meaning of the arguments.
#pragma once

#include "kernels/activation.h"
#include "ops/operator.h"

#include <array>

namespace cudnn_ops {

// In the order of the schema of cudnn_ops::_group_norm_check.
struct GroupNorm {
  at::Tensor input;
  OptionalTensor residual;  // the norm is of the sum of both
  int64_t num_groups = 0;
  OptionalTensor weight, bias;
  double eps = 0;
  int64_t activation = 0;  // an Activation: none or SiLU
  CUDNN_OPS_FIELDS(input, residual, num_groups, weight, bias, eps, activation)
  bool has_silu() const {
    return activation == static_cast<int64_t>(Activation::kSilu);
  }
};

// cudnn_ops::_group_norm.
struct GroupNormForward {
  GroupNorm norm;
  bool with_stats = false;
  CUDNN_OPS_FIELDS(norm, with_stats)
};

// What the backward reads of the forward; `input` is the sum where there was a residual.
struct GroupNormSaved {
  at::Tensor input;
  int64_t num_groups = 0;
  OptionalTensor weight, bias;
  at::Tensor mean, rstd;
  int64_t activation = 0;
  CUDNN_OPS_FIELDS(input, num_groups, weight, bias, mean, rstd, activation)
  // The forward, as far as it is known.
  GroupNorm norm() const {
    return {input, {}, num_groups, weight, bias, 0, activation};
  }
};

// cudnn_ops::_group_norm_backward.
struct GroupNormBackward {
  at::Tensor grad_out;
  OptionalTensor grad_sum;  // becomes part of the gradient of the input
  GroupNormSaved saved;
  std::array<bool, 3> output_mask{};
  CUDNN_OPS_FIELDS(grad_out, grad_sum, saved, output_mask)
};

// The output, the sum, and what the backward needs of each group, mean and 1 / deviation, float32
// [N, num_groups] (float64 for float64 inputs). [0] where nobody asks for it.
using GroupNormResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
// Of input, weight and bias; [0] where nobody asks for it.
using GroupNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The public operators.
at::Tensor group_norm(const at::Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, std::string_view activation);
std::tuple<at::Tensor, at::Tensor> add_group_norm(const at::Tensor& input,
                                                  const at::Tensor& residual, int64_t num_groups,
                                                  const OptionalTensor& weight,
                                                  const OptionalTensor& bias, double eps,
                                                  std::string_view activation);

// The public operator's.
const char* name_of(const GroupNorm& args);
void check_group_norm(const GroupNorm& args);
void check_group_norm_backward(const GroupNormBackward& args);

const Operator<GroupNormResults, GroupNormForward>& group_norm_op();

}  // namespace cudnn_ops
