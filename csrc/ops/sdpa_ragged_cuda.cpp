// Attention on polymorphic plans: repack what offsets cannot address, make the table of offsets
// and lengths, run, and put the results where they belong.

#include "sdpa_cuda.h"
#include "sdpa_ragged.h"

#include "../graph/ragged_table.h"

#include <ATen/cuda/EmptyTensor.h>

#include <limits>

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

// What the plan writes in place of a result: the result itself where offsets can address it.
class Result {
 public:
  explicit Result(const at::Tensor& result)
      : result_(result), written_(lies_well(result) ? result : empty_token_major(result)) {
  }
  const at::Tensor& tensor() const {
    return written_;
  }
  void finish() const {
    if (!written_.is_same(result_)) result_.copy_(written_);
  }

 private:
  const at::Tensor& result_;
  at::Tensor written_;
};

// The log-sum-exp as the plan is declared, [declared batch, H, declared length], of which the
// first part holds the values; cuDNN 9.19 takes no other strides. Where the problem fills what is
// declared, that is the log-sum-exp itself.
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

using Pointers = c10::SmallVector<void*, 24>;

void add_lengths(graph::RaggedTable& table, const at::Tensor& query, const at::Tensor& key,
                 const SequenceLengths* lengths) {
  if (lengths != nullptr) {
    table.add_lengths(lengths->query.const_data_ptr());
    table.add_lengths(lengths->key.const_data_ptr());
  } else {
    table.add_lengths(query.size(2));
    table.add_lengths(key.size(2));
  }
}

// Runs the plan that `find` gives for the call; false if there is none. With `lengths`, what
// lies beyond them is 0 in the results, and minus infinity in the log-sum-exp.
template <class FindPlan>
bool run(const SdpaForwardParams& declared, const SdpaForwardTensors& tensors, float* scale,
         const SequenceLengths* lengths, const FindPlan& find) {
  const at::Tensor query = packed(tensors.query), key = packed(tensors.key),
                   value = packed(tensors.value);
  const Result out(tensors.out);
  Pointers pointers{read(query), read(key), read(value), scale, write(out.tensor())};
  std::optional<PaddedLse> lse;
  if (declared.with_lse) {
    lse.emplace(declared.query, tensors.lse);
    pointers.push_back(write(lse->memory));
  }
  if (lengths != nullptr) {
    out.tensor().zero_();
    if (lse) lse->values.fill_(-std::numeric_limits<double>::infinity());
  }
  graph::RaggedTable table(query.size(0), declared.query.sizes[0]);
  for (const auto* tensor : {&query, &key, &value, &out.tensor()}) table.add_offsets(step(*tensor));
  add_lengths(table, query, key, lengths);
  const auto memory = table.upload(pointers, graph::is_capturing());
  const graph::Call call = forward_call(pointers, {});
  const auto plan = find(call);
  if (plan == nullptr) return false;
  graph::execute(call, *plan);
  out.finish();
  if (lse && lse->is_copy) tensors.lse.copy_(lse->values);
  return true;
}

template <class FindPlan>
bool run(const SdpaBackwardParams& declared, const SdpaBackwardTensors& tensors, float* scale,
         const SequenceLengths* lengths, const FindPlan& find) {
  const at::Tensor query = packed(tensors.query), key = packed(tensors.key),
                   value = packed(tensors.value), out = packed(tensors.out),
                   grad_out = packed(tensors.grad_out);
  const Result grad_query(tensors.grad_query), grad_key(tensors.grad_key),
      grad_value(tensors.grad_value);
  const PaddedLse lse(declared.query, tensors.lse);
  if (lse.is_copy) lse.values.copy_(tensors.lse);
  Pointers pointers{read(query),
                    read(key),
                    read(value),
                    scale,
                    read(out),
                    read(lse.memory),
                    read(grad_out),
                    write(grad_query.tensor()),
                    write(grad_key.tensor()),
                    write(grad_value.tensor())};
  if (lengths != nullptr) {
    for (const auto* result : {&grad_query, &grad_key, &grad_value}) result->tensor().zero_();
  }
  graph::RaggedTable table(query.size(0), declared.query.sizes[0]);
  for (const auto* tensor : {&query, &key, &value, &out, &grad_out, &grad_query.tensor(),
                             &grad_key.tensor(), &grad_value.tensor()}) {
    table.add_offsets(step(*tensor));
  }
  add_lengths(table, query, key, lengths);
  const auto memory = table.upload(pointers, graph::is_capturing());
  const graph::Call call = backward_call(pointers, {});
  const auto plan = find(call);
  if (plan == nullptr) return false;
  graph::execute(call, *plan);
  for (const auto* result : {&grad_query, &grad_key, &grad_value}) result->finish();
  return true;
}

template <class Params, class Tensors>
bool run_if_taken(const Params& params, const graph::PlanKey& exact, const Tensors& tensors,
                  float* scale) {
  const auto declared = ragged(params);
  if (!declared) return false;
  const auto polymorphic = graph::PlanKey::of(*declared, exact.target());
  const auto family = graph::PlanKey::of(family_of(*declared), exact.target());
  if (!graph::takes_polymorphic(exact, polymorphic, family)) return false;
  return run(*declared, tensors, scale, nullptr, [&](const graph::Call& call) {
    return graph::polymorphic_plan(call, polymorphic, family);
  });
}

template <class Params, class Tensors>
void run_always(const Params& params, const Tensors& tensors, const SequenceLengths& lengths,
                float* scale) {
  const auto declared = ragged(params);
  TORCH_CHECK_NOT_IMPLEMENTED(
      declared, "cudnn_ops.sdpa: ", tensors.query.sizes(), " and ", tensors.key.sizes(),
      " with lengths on the device is more than cuDNN takes: 2^31 elements, 65535 sequences");
  run(*declared, tensors, scale, &lengths, [&](const graph::Call& call) {
    return graph::get_plan(call, graph::PlanKey::of(*declared, tensors.query.get_device()));
  });
}

}  // namespace

bool run_ragged(const SdpaForwardParams& params, const graph::PlanKey& exact,
                const SdpaForwardTensors& tensors, float* scale) {
  return run_if_taken(params, exact, tensors, scale);
}

bool run_ragged(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                const SdpaBackwardTensors& tensors, float* scale) {
  return run_if_taken(params, exact, tensors, scale);
}

void run_padded(const SdpaForwardParams& params, const SdpaForwardTensors& tensors,
                const SequenceLengths& lengths, float* scale) {
  run_always(params, tensors, lengths, scale);
}

void run_padded(const SdpaBackwardParams& params, const SdpaBackwardTensors& tensors,
                const SequenceLengths& lengths, float* scale) {
  run_always(params, tensors, lengths, scale);
}

}  // namespace cudnn_ops
