// Attention on polymorphic plans: repack what offsets cannot address, make the table of offsets
// and lengths, run, and put the results where they belong.

#include "sdpa_cuda.h"
#include "sdpa_ragged.h"

#include "../graph/ragged_table.h"

#include <ATen/cuda/EmptyTensor.h>

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
// first part holds the values. cuDNN 9.19 takes no other strides.
struct PaddedLse {
  at::Tensor memory, values;

  PaddedLse(const TensorDesc& declared_query, const at::Tensor& lse) {
    const auto& sizes = declared_query.sizes;
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

// Appends the table's addresses and runs the plan; false if cuDNN has none for this family.
bool run(graph::Call (*describe)(c10::ArrayRef<void*>, c10::ArrayRef<graph::Call::Written>),
         const graph::RaggedTable& table, Pointers& pointers,
         c10::ArrayRef<graph::Call::Written> written, const graph::PlanKey& polymorphic,
         const graph::PlanKey& family) {
  const auto memory = table.upload(pointers, graph::is_capturing());
  const graph::Call call = describe(pointers, written);
  const auto plan = graph::polymorphic_plan(call, polymorphic, family);
  if (plan != nullptr) graph::execute(call, *plan);
  return plan != nullptr;
}

}  // namespace

bool run_ragged(const SdpaForwardParams& params, const graph::PlanKey& exact,
                const SdpaForwardTensors& tensors, float* scale) {
  const auto declared = ragged(params);
  if (!declared) return false;
  const auto polymorphic = graph::PlanKey::of(*declared, exact.target());
  const auto family = graph::PlanKey::of(family_of(*declared), exact.target());
  if (!graph::takes_polymorphic(exact, polymorphic, family)) return false;

  const at::Tensor query = packed(tensors.query), key = packed(tensors.key),
                   value = packed(tensors.value);
  const Result out(tensors.out);
  Pointers pointers{read(query), read(key), read(value), scale, write(out.tensor())};
  c10::SmallVector<graph::Call::Written, 2> written{{4, out.tensor().nbytes()}};
  std::optional<PaddedLse> lse;
  if (params.with_lse) {
    lse.emplace(declared->query, tensors.lse);
    pointers.push_back(write(lse->memory));
    written.push_back({5, lse->memory.nbytes()});
  }
  graph::RaggedTable table(query.size(0), declared->query.sizes[0]);
  for (const auto* tensor : {&query, &key, &value, &out.tensor()}) table.add_offsets(step(*tensor));
  table.add_lengths(query.size(2));
  table.add_lengths(key.size(2));
  if (!run(forward_call, table, pointers, written, polymorphic, family)) return false;
  out.finish();
  if (lse) tensors.lse.copy_(lse->values);
  return true;
}

bool run_ragged(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                const SdpaBackwardTensors& tensors, float* scale) {
  const auto declared = ragged(params);
  if (!declared) return false;
  const auto polymorphic = graph::PlanKey::of(*declared, exact.target());
  const auto family = graph::PlanKey::of(family_of(*declared), exact.target());
  if (!graph::takes_polymorphic(exact, polymorphic, family)) return false;

  const at::Tensor query = packed(tensors.query), key = packed(tensors.key),
                   value = packed(tensors.value), out = packed(tensors.out),
                   grad_out = packed(tensors.grad_out);
  const Result grad_query(tensors.grad_query), grad_key(tensors.grad_key),
      grad_value(tensors.grad_value);
  const PaddedLse lse(declared->query, tensors.lse);
  lse.values.copy_(tensors.lse);
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
  const std::array<graph::Call::Written, 3> written{{{7, grad_query.tensor().nbytes()},
                                                     {8, grad_key.tensor().nbytes()},
                                                     {9, grad_value.tensor().nbytes()}}};
  graph::RaggedTable table(query.size(0), declared->query.sizes[0]);
  for (const auto* tensor : {&query, &key, &value, &out, &grad_out, &grad_query.tensor(),
                             &grad_key.tensor(), &grad_value.tensor()}) {
    table.add_offsets(step(*tensor));
  }
  table.add_lengths(query.size(2));
  table.add_lengths(key.size(2));
  if (!run(backward_call, table, pointers, written, polymorphic, family)) return false;
  for (const auto* result : {&grad_query, &grad_key, &grad_value}) result->finish();
  return true;
}

}  // namespace cudnn_ops
