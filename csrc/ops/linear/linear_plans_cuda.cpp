#include "ops/linear/linear_plans.h"
#include "ops/linear/linear_problem.h"

#include "graph/autotune.h"
#include "graph/call_pointers.h"
#include "graph/plan_policy.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/FunctionRef.h>

#include <mutex>
#include <optional>
#include <unordered_map>

namespace cudnn_ops {
namespace {

// Whether the plan of a key was timed to be faster than what else runs it.
class TimedPlans {
 public:
  std::optional<bool> find(const graph::PlanKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = is_faster_.find(key);
    return found == is_faster_.end() ? std::nullopt : std::optional(found->second);
  }
  void set(const graph::PlanKey& key, bool is_faster) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_faster_.size() >= kMost) is_faster_.clear();
    is_faster_.insert_or_assign(key, is_faster);
  }

 private:
  static constexpr size_t kMost = 4096;
  std::mutex mutex_;
  std::unordered_map<graph::PlanKey, bool, graph::PlanKeyHash> is_faster_;
};

TimedPlans& timed_plans() {
  static auto* all = new TimedPlans();
  return *all;
}

bool is_autotuned() {
  return graph::PlanPolicy::global().autotune() != graph::Autotune::kOff;
}

// By the table.
bool is_graph_for(LinearStep step, Activation activation, const at::Tensor& left, int64_t columns) {
  return is_graph_faster(current_limits().sm_version,
                         {step, activation, left.size(0), columns, left.size(1)});
}

// A plan and what it is run with.
template <class Params>
struct PlannedStep {
  const char* op;
  Params params;
  graph::CallPointers pointers;
  at::Tensor sum{};  // an engine may add to what is there: filled with zeros before each run

  // Runs it where it is faster than `otherwise`, which computes the same: as the table says, or,
  // where autotune is on, as is timed here once. False where it does not run.
  bool run(int device, bool is_faster, c10::function_ref<void()> otherwise) const {
    const graph::Call call{op, "torch.nn.functional.linear runs it", pointers.all,
                           pointers.written};
    const auto key = graph::PlanKey::of(params, device);
    const auto plan = graph::often_called_plan(call, key);
    if (plan == nullptr) return false;
    const auto execute = [&] {
      if (sum.defined()) sum.zero_();
      graph::execute(call, *plan);
    };
    if (is_autotuned()) {
      if (const auto timed = timed_plans().find(key)) {
        is_faster = *timed;
      } else if (!graph::is_capturing()) {
        is_faster = graph::time_calls(execute) < graph::time_calls(otherwise);
        timed_plans().set(key, is_faster);
      }
    }
    if (is_faster) execute();
    return is_faster;
  }
};

}  // namespace

bool run_layer_by_plan(const char* op, const LinearStepCall& call) {
  const bool is_faster = is_graph_for(call.step(), call.activation, call.input, call.out.size(1));
  // With a bare product there is nothing to fuse.
  const bool is_bare = call.activation == Activation::kNone && !call.residual;
  if (!is_faster && (is_bare || !is_autotuned())) return false;
  const Linear args{call.input, call.weight, call.bias, call.residual,
                    static_cast<int64_t>(call.activation)};
  if (!reason_for_no_plan(args).empty()) return false;
  at::Tensor bias, residual;
  if (call.bias) bias = graph::dense(*call.bias);
  if (call.residual) residual = graph::dense(*call.residual);
  PlannedStep<LinearParams> step{op, linear_params(args, call.keep()), {}};
  for (const auto& tensor : {call.input, call.weight, bias, residual}) step.pointers.read(tensor);
  step.pointers.write(call.before);
  step.pointers.write(call.out);
  return step.run(call.input.get_device(), is_faster, [&] { run_layer(call); });
}

bool keeps_slope_by_plan(const Mlp& mlp) {
  const at::Tensor &input = mlp.input, &weight = mlp.weight1;
  const auto is_symbolic = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  if (is_symbolic(input) || is_symbolic(weight) || input.numel() == 0 || weight.numel() == 0 ||
      !input.is_contiguous() || at::cuda::device_count() == 0) {
    return false;
  }
  const c10::cuda::CUDAGuard device_guard(input.device());
  const int64_t depth = input.size(-1);
  const LinearProblem problem{LinearStep::kTrainingSlope, mlp.kind(), input.numel() / depth,
                              weight.size(0), depth};
  if (!is_graph_faster(current_limits().sm_version, problem)) return false;
  if (input.unsafeGetTensorImpl()->is_python_dispatch()) return true;
  const Linear args{as_matrix(input), weight, mlp.bias1, /*residual=*/{}, mlp.activation};
  if (!reason_for_no_plan(args).empty()) return false;
  return graph::is_called_often(
      graph::PlanKey::of(linear_params(args, Keep::kSlope), input.get_device()));
}

at::Tensor into_hidden_by_plan(const char* op, const at::Tensor& grad_out, const at::Tensor& weight,
                               const OptionalTensor& saved, Activation activation,
                               const at::Tensor& grad_bias) {
  const int64_t columns = weight.size(1);
  const bool is_faster = is_graph_for(LinearStep::kHiddenGradient, activation, grad_out, columns);
  if (!saved || !(is_faster || is_autotuned())) return {};
  const HiddenGradient args{grad_out, weight, activation, grad_bias.defined()};
  if (!reason_for_no_plan(args).empty()) return {};
  const auto empty = [&](c10::IntArrayRef sizes, at::ScalarType dtype) {
    return at::detail::empty_cuda(sizes, dtype, grad_out.device(), std::nullopt);
  };
  const at::Tensor grad = empty({grad_out.size(0), columns}, grad_out.scalar_type());
  const at::Tensor of_activation = graph::dense(*saved);
  PlannedStep<HiddenGradientParams> step{op, hidden_gradient_params(args), {}};
  if (args.with_sum) step.sum = empty({columns}, at::kFloat);
  for (const auto& tensor : {grad_out, weight, of_activation}) step.pointers.read(tensor);
  step.pointers.write(grad);
  step.pointers.write(step.sum);
  const bool has_run = step.run(grad_out.get_device(), is_faster, [&] {
    into_hidden(grad_out, weight, saved, activation, grad_bias);
  });
  if (!has_run) return {};
  if (args.with_sum) at::Tensor(grad_bias).copy_(step.sum);
  return grad;
}

}  // namespace cudnn_ops
