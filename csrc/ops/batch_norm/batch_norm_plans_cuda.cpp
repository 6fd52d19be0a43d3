#include "ops/batch_norm/batch_norm_plans.h"

#include "ops/image_order_cuda.h"

#include "graph/call_pointers.h"
#include "graph/plan_policy.h"
#include "kernels/batch_norm.h"

#include <ATen/Context.h>
#include <ATen/cuda/EmptyTensor.h>

namespace cudnn_ops {
namespace {

constexpr const char* kAdvice = "torch.nn.functional.batch_norm has kernels for the rest";

// Engines load 16 bytes at once and do not check addresses: see batch_norm_problem.cpp.
bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % graph::TensorDesc::kAlignment == 0;
}

// An image, which has its channels last already.
at::Tensor aligned_image(const at::Tensor& image) {
  return aligned_in_order(image, /*is_last=*/true, graph::TensorDesc::kAlignment);
}

// Numbers of each channel as plans have them, float32, contiguous and aligned. Those that are not
// so are copied together.
class Vectors {
 public:
  explicit Vectors(const at::Tensor& image) : image_(image) {
  }

  // The vector, or memory that copy() fills. Each has memory of its own: see
  // batch_norm_problem.cpp.
  at::Tensor find(const OptionalTensor& vector, float otherwise = 0) {
    if (vector && vector->scalar_type() == at::kFloat && vector->is_contiguous() &&
        is_aligned(*vector)) {
      return *vector;
    }
    const at::Tensor to =
        at::detail::empty_cuda({image_.size(1)}, at::kFloat, image_.device(), std::nullopt);
    copies_.push_back({vector ? vector->contiguous() : at::Tensor(), to, otherwise});
    return to;
  }
  void copy() const {
    if (!copies_.empty()) batch_norm_copy(copies_);
  }

 private:
  const at::Tensor& image_;
  c10::SmallVector<BatchNormCopy, 4> copies_;
};

// Runs the plan of `params` if a size that is called often has one. `prepare` gives its pointers;
// it is asked only then.
template <class Params, class Prepare>
bool run(const Params& params, int device, const Prepare& prepare) {
  const auto key = graph::PlanKey::of(params, device);
  const bool wants_autotune = at::globalContext().benchmarkCuDNN();
  if (!graph::is_called_often(key, wants_autotune)) return false;
  const graph::CallPointers& pointers = prepare();
  const graph::Call call{kBatchNorm, kAdvice, pointers.all, pointers.written, wants_autotune};
  const auto plan = graph::often_called_plan(call, key);
  if (plan != nullptr) graph::execute(call, *plan);
  return plan != nullptr;
}

// Copies running statistics that a plan has changed elsewhere to where they belong.
void write_back(std::initializer_list<std::pair<const OptionalTensor&, const at::Tensor&>> all) {
  c10::SmallVector<BatchNormCopy, 2> copies;
  for (const auto& [statistic, changed] : all) {
    if (!statistic || statistic->is_same(changed)) continue;
    if (statistic->is_contiguous()) {
      copies.push_back({changed, *statistic});
    } else {
      at::Tensor(*statistic).copy_(changed);
    }
  }
  if (!copies.empty()) batch_norm_copy(copies);
}

}  // namespace

bool run_batch_norm_plan(const BatchNorm& args, const at::Tensor& out, const at::Tensor& mean,
                         const at::Tensor& rstd) {
  at::Tensor input, weight, bias, running_mean, running_var;
  auto eps = static_cast<float>(args.eps), momentum = static_cast<float>(args.momentum);
  graph::CallPointers pointers;
  const auto prepare = [&]() -> const graph::CallPointers& {
    input = aligned_image(args.input);
    Vectors vectors(input);
    weight = vectors.find(args.weight, 1);
    bias = vectors.find(args.bias, 0);
    if (args.running_mean) {
      running_mean = vectors.find(args.running_mean);
      running_var = vectors.find(args.running_var);
    }
    vectors.copy();
    for (const auto& tensor : {input, weight, bias, running_mean, running_var}) {
      pointers.read(tensor);
    }
    pointers.all.push_back(&eps);
    if (running_mean.defined()) pointers.all.push_back(&momentum);
    // The running statistics in place: who writes those of a channel has read them.
    for (const auto& tensor : {mean, rstd, running_mean, running_var, out}) pointers.write(tensor);
    return pointers;
  };
  if (!run(batch_norm_params(args), args.input.get_device(), prepare)) return false;
  write_back({{args.running_mean, running_mean}, {args.running_var, running_var}});
  return true;
}

bool run_batch_norm_backward_plan(const BatchNormSaved& saved, const at::Tensor& grad_out,
                                  const BatchNormWritten& written) {
  at::Tensor input, grad, weight, mean, rstd;
  graph::CallPointers pointers;
  const auto prepare = [&]() -> const graph::CallPointers& {
    input = aligned_image(saved.input);
    grad = aligned_image(grad_out);
    Vectors vectors(input);
    weight = vectors.find(saved.weight, 1);
    mean = vectors.find(saved.mean);
    rstd = vectors.find(saved.rstd);
    vectors.copy();
    for (const auto& tensor : {input, weight, mean, rstd, grad}) pointers.read(tensor);
    for (const auto& tensor : {written.grad_input, written.grad_weight, written.grad_bias}) {
      pointers.write(tensor);
    }
    return pointers;
  };
  const auto params = batch_norm_backward_params(saved.input);
  return run(params, saved.input.get_device(), prepare);
}

}  // namespace cudnn_ops
