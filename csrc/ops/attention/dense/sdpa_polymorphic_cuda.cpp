// Attention on polymorphic plans: repack what offsets cannot address, make the table of offsets
// and lengths, run, and put the results where they belong.

#include "ops/attention/dense/sdpa_cuda.h"
#include "ops/attention/polymorphic.h"
#include "ops/attention/polymorphic_cost.h"

#include "graph/offset_table.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/EmptyTensor.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

bool lies_well(const at::Tensor& tensor) {
  return is_token_major(TensorDesc::of(tensor));
}

at::Tensor empty_token_major(const at::Tensor& like) {
  const auto sizes = like.sizes();
  const at::Tensor memory = at::detail::empty_cuda({sizes[0], sizes[2], sizes[1], sizes[3]},
                                                   like.scalar_type(), like.device(), std::nullopt);
  return memory.transpose(1, 2);
}

at::Tensor packed(const at::Tensor& tensor) {
  return lies_well(tensor) ? tensor : empty_token_major(tensor).copy_(tensor);
}

// What the plan writes in place of a result: the result itself where offsets can address it. With
// `zero`, it is 0 where the plan writes nothing.
class Result {
 public:
  Result(const at::Tensor& result, bool zero)
      : result_(result), written_(lies_well(result) ? result : empty_token_major(result)) {
    if (zero) written_.zero_();
  }
  const at::Tensor& tensor() const {
    return written_;
  }
  void finish() const {
    if (!written_.is_same(result_)) result_.copy_(written_);
  }

 private:
  at::Tensor result_, written_;
};

// The log-sum-exp as the plan is declared, [declared batch, H, declared length], of which the
// first part holds the values; cuDNN 9.19 supports no other strides. Where the problem fills what
// is declared, that is the log-sum-exp itself.
struct PaddedLse {
  at::Tensor memory, values;
  bool is_copy;

  PaddedLse(const TensorDesc& declared_query, const at::Tensor& lse)
      : memory(lse), values(lse), is_copy(false) {
    const auto& sizes = declared_query.sizes;
    if (lse.size(0) == sizes[0] && lse.size(2) == sizes[2]) return;
    is_copy = true;
    memory = at::detail::empty_cuda({sizes[0], sizes[1], sizes[2]}, at::kFloat, lse.device(),
                                    std::nullopt);
    values = memory.narrow(0, 0, lse.size(0)).narrow(2, 0, lse.size(2));
  }
};

// Elements from one sequence to the next.
int64_t step(const at::Tensor& tensor) {
  return tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(2) * tensor.stride(2);
}

void add_lengths(graph::OffsetTable& table, const MaskTensors& mask, const at::Tensor& query,
                 const at::Tensor& key) {
  if (mask.lengths.defined()) {
    table.add_lengths(mask.lengths.const_data_ptr());
    table.add_lengths(mask.lengths_kv.const_data_ptr());
  } else {
    table.add_lengths(query.size(2));
    table.add_lengths(key.size(2));
  }
}

// Runs the plan that `find` gives for the call; false if there is none. It leaves alone what lies
// beyond lengths that only the device knows: that is 0, and minus infinity in the log-sum-exp.
template <class FindPlan>
bool run(const SdpaForwardParams& declared, SdpaForwardTensors tensors, const FindPlan& find) {
  for (auto* tensor : {&tensors.query, &tensors.key, &tensors.value}) *tensor = packed(*tensor);
  const Result out(tensors.out, tensors.mask.lengths.defined());
  std::optional<PaddedLse> lse;
  if (declared.with_lse) {
    lse.emplace(declared.query, tensors.lse);
    if (tensors.mask.lengths.defined()) {
      lse->values.fill_(-std::numeric_limits<double>::infinity());
    }
  }
  const at::Tensor lse_result = std::exchange(tensors.lse, lse ? lse->memory : at::Tensor());
  tensors.out = out.tensor();
  SdpaPointers pointers(declared, tensors);
  pointers.written.clear();
  graph::OffsetTable table(tensors.query.size(0), declared.query.sizes[0]);
  for (const auto* tensor : {&tensors.query, &tensors.key, &tensors.value, &tensors.out}) {
    table.add_offsets(step(*tensor));
  }
  add_lengths(table, tensors.mask, tensors.query, tensors.key);
  const auto memory = table.upload(pointers.all, graph::is_capturing());
  const graph::Call call = call_of(kSdpaCall, pointers);
  const auto plan = find(call);
  if (plan == nullptr) return false;
  graph::execute(call, *plan);
  out.finish();
  if (lse && lse->is_copy) lse_result.copy_(lse->values);
  return true;
}

template <class FindPlan>
bool run(const SdpaBackwardParams& declared, SdpaBackwardTensors tensors, const FindPlan& find) {
  for (auto* tensor :
       {&tensors.query, &tensors.key, &tensors.value, &tensors.out, &tensors.grad_out}) {
    *tensor = packed(*tensor);
  }
  const bool zero = tensors.mask.lengths.defined();
  const Result grad_query(tensors.grad_query, zero), grad_key(tensors.grad_key, zero),
      grad_value(tensors.grad_value, zero);
  const PaddedLse lse(declared.query, tensors.lse);
  if (lse.is_copy) lse.values.copy_(tensors.lse);
  tensors.lse = lse.memory;
  tensors.grad_query = grad_query.tensor();
  tensors.grad_key = grad_key.tensor();
  tensors.grad_value = grad_value.tensor();
  SdpaPointers pointers(declared, tensors);
  pointers.written.clear();
  graph::OffsetTable table(tensors.query.size(0), declared.query.sizes[0]);
  for (const auto* tensor :
       {&tensors.query, &tensors.key, &tensors.value, &tensors.out, &tensors.grad_out,
        &tensors.grad_query, &tensors.grad_key, &tensors.grad_value}) {
    table.add_offsets(step(*tensor));
  }
  add_lengths(table, tensors.mask, tensors.query, tensors.key);
  const auto memory = table.upload(pointers.all, graph::is_capturing());
  const graph::Call call = call_of(kSdpaBackwardCall, pointers);
  const auto plan = find(call);
  if (plan == nullptr) return false;
  graph::execute(call, *plan);
  for (const auto* result : {&grad_query, &grad_key, &grad_value}) result->finish();
  return true;
}

AttentionStep step_of(const SdpaForwardParams& params) {
  return params.with_lse ? AttentionStep::kTraining : AttentionStep::kInference;
}

AttentionStep step_of(const SdpaBackwardParams& /*params*/) {
  return AttentionStep::kBackward;
}

// Results change by rounding with the plan, and time changes it at another call in each run.
bool keeps_plan(const SdpaForwardParams& /*params*/) {
  return at::globalContext().deterministicAlgorithms();
}

bool keeps_plan(const SdpaBackwardParams& params) {
  return params.is_deterministic || at::globalContext().deterministicAlgorithms();
}

double seconds_of_copies(std::initializer_list<const TensorDesc*> tensors) {
  double seconds = 0;
  for (const auto* tensor : tensors) {
    const auto& sizes = tensor->sizes;
    if (!is_token_major(*tensor))
      seconds += copy_seconds(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  }
  return seconds;
}

double seconds_of_copies(const SdpaForwardParams& params) {
  return seconds_of_copies({&params.query, &params.key, &params.value, &params.out});
}

double seconds_of_copies(const SdpaBackwardParams& params) {
  return seconds_of_copies({&params.query, &params.key, &params.value, &params.out,
                            &params.grad_out, &params.grad_query, &params.grad_key,
                            &params.grad_value});
}

template <class Params>
std::optional<double> lost_seconds(const Params& params, const Band& band) {
  if (keeps_plan(params)) return std::nullopt;
  const auto* gpu = at::cuda::getCurrentDeviceProperties();
  const auto &query = params.query.sizes, &key = params.key.sizes;
  const double pairs = attended_pairs(query[2], key[2], band.left, band.right, band.bottom_right);
  return seconds_of_copies(params) + lost_seconds(step_of(params), pairs, query[0], query[1],
                                                  query[3], gpu->multiProcessorCount,
                                                  gpu->major * 10 + gpu->minor);
}

template <class Params, class Tensors>
bool run_if_taken(const Params& params, const graph::PlanKey& exact, const Tensors& tensors,
                  const Band& band) {
  const auto declared = polymorphic(params, band);
  if (!declared) return false;
  const auto general = graph::PlanKey::of(*declared, exact.target());
  const auto family = graph::PlanKey::of(family_of(*declared), exact.target());
  if (!graph::takes_polymorphic(exact, general, family, lost_seconds(params, band))) return false;
  return run(*declared, tensors, [&](const graph::Call& call) {
    return graph::polymorphic_plan(call, general, family);
  });
}

}  // namespace

bool run_polymorphic(const SdpaForwardParams& params, const graph::PlanKey& exact,
                     const SdpaForwardTensors& tensors, const Band& band) {
  return run_if_taken(params, exact, tensors, band);
}

bool run_polymorphic(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                     const SdpaBackwardTensors& tensors, const Band& band) {
  return run_if_taken(params, exact, tensors, band);
}

}  // namespace cudnn_ops
