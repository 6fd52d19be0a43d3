// Mixture of experts: what its files share. See cudnn_ops/ops/moe.py for what each operator
// computes.
#pragma once

#include "ops/operator.h"

#include <array>

namespace cudnn_ops {

// Each in the order of its schema.
struct MoePermute {
  at::Tensor input, expert_indices;
  c10::SymInt num_experts;
  CUDNN_OPS_FIELDS(input, expert_indices, num_experts)
};

using MoePermuted = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // rows, offsets, positions

struct MoeCombine {
  at::Tensor rows, positions;
  OptionalTensor weights;
  CUDNN_OPS_FIELDS(rows, positions, weights)
};

// `rows` is there where the gradient of the weights is asked for.
struct MoeCombineBackward {
  at::Tensor grad_out;
  OptionalTensor rows;
  at::Tensor positions;
  OptionalTensor weights;
  std::array<bool, 2> output_mask{};
  CUDNN_OPS_FIELDS(grad_out, rows, positions, weights, output_mask)
};

struct GroupedLinear {
  at::Tensor input, weight, offsets;
  CUDNN_OPS_FIELDS(input, weight, offsets)
};

struct GroupedLinearBackward {
  at::Tensor grad_out;
  GroupedLinear forward;
  std::array<bool, 2> output_mask{};
  CUDNN_OPS_FIELDS(grad_out, forward, output_mask)
};

using MoeGradients = std::tuple<at::Tensor, at::Tensor>;  // of the first two that have one

void check_moe_permute(const MoePermute& args);
void check_moe_combine(const MoeCombine& args);
void check_moe_combine_backward(const MoeCombineBackward& args);
void check_grouped_linear(const GroupedLinear& args);
void check_grouped_linear_backward(const GroupedLinearBackward& args);

const Operator<MoePermuted, MoePermute>& moe_permute_op();
const Operator<at::Tensor, MoeCombine>& moe_combine_op();
const Operator<at::Tensor, GroupedLinear>& grouped_linear_op();

}  // namespace cudnn_ops
