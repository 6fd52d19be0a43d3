// The plans that linear layers may have, and what runs them, for those who ask without calling.

#include "ops/linear/linear_choice.h"
#include "ops/linear/linear_problem.h"

#include "graph/plan_key.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

// A plan's key; or none, and why.
using KeyOrReason = std::tuple<std::vector<int64_t>, std::string>;

template <class Params>
std::vector<int64_t> words_of(const Params& params) {
  return graph::PlanKey::of(params, 0).words().vec();
}

KeyOrReason plan_key(const Linear& given, int64_t keep) {
  check_linear(given);
  Linear args = given;
  args.input = as_matrix(args.input);
  args.residual = as_matrix(args.residual);
  const auto reason = reason_for_no_plan(args);
  if (!reason.empty()) return {std::vector<int64_t>(), std::string(reason)};
  const bool is_kept = needs_before(args.kind(), args.residual.has_value());
  return {words_of(linear_params(args, is_kept ? keep_at(keep) : Keep::kNothing)), ""};
}

KeyOrReason hidden_gradient_plan_key(const at::Tensor& grad, const at::Tensor& weight,
                                     int64_t activation, bool with_sum) {
  const HiddenGradient args{as_matrix(grad), weight, slope_at(activation), with_sum};
  const auto reason = reason_for_no_plan(args);
  if (!reason.empty()) return {std::vector<int64_t>(), std::string(reason)};
  return {words_of(hidden_gradient_params(args)), ""};
}

// A LinearEngine, and whether cuDNN's graph is faster.
std::tuple<int64_t, bool> engine(int64_t sm_version, int64_t step, int64_t activation, int64_t rows,
                                 int64_t columns, int64_t depth) {
  const LinearProblem problem{static_cast<LinearStep>(step), slope_at(activation), rows, columns,
                              depth};
  const int sm = static_cast<int>(sm_version);
  return {static_cast<int64_t>(choose_engine(sm, problem)), is_graph_faster(sm, problem)};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  m.def(
      "_linear_plan_key(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "int activation, int keep) -> (int[] words, str reason)",
      [](const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& residual, int64_t activation,
         int64_t keep) { return plan_key({input, weight, bias, residual, activation}, keep); });
  m.def(
      "_hidden_gradient_plan_key(Tensor grad, Tensor weight, int activation, bool with_sum) "
      "-> (int[] words, str reason)",
      hidden_gradient_plan_key);
  m.def(
      "_linear_engine(int sm_version, int step, int activation, int rows, int columns, int depth) "
      "-> (int engine, bool is_graph_faster)",
      engine);
}
