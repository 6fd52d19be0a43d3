#include "ops/attention/plan_tensors_cuda.h"

#include "ops/attention/layout.h"

#include <ATen/cuda/EmptyTensor.h>

#include <cmath>

namespace cudnn_ops {
namespace {

// One more than the largest offset, in elements, from the first element of a nonempty tensor.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return last + 1;
}

void* read(const at::Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());
}

}  // namespace

at::Tensor empty_like_order(c10::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_strided_cuda(sizes, dense_strides_like(sizes, like), like.scalar_type(),
                                        like.device());
}

at::Tensor addressable(const at::Tensor& tensor, const at::Tensor& like, int64_t max_extent) {
  if (graph::is_addressable(tensor) && extent(tensor) <= max_extent) return tensor;
  return empty_like_order(tensor.sizes(), like).copy_(tensor);
}

Scale::Scale(std::optional<double> scale, const at::Tensor& query) {
  value = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1)))));
  // The GPU flushes what is smaller than the smallest normal number to zero.
  const bool is_zero = std::abs(value) < std::numeric_limits<float>::min();
  query_sign = is_zero ? 0 : value > 0 ? 1 : -1;
  value = is_zero ? 1.0F : std::abs(value);
}

at::Tensor Scale::applied_to(const at::Tensor& query) const {
  return query_sign == 1 ? query : query.mul(query_sign);
}

void fill_with_nothing(const at::Tensor& out, const at::Tensor& lse, const OptionalTensor& sinks) {
  out.zero_();
  if (!lse.defined()) return;
  if (sinks) {
    lse.copy_(sinks->unsqueeze(-1));
  } else {
    lse.fill_(-std::numeric_limits<double>::infinity());
  }
}

MaskTensors MaskTensors::of(const AttentionOptions& options, const at::Tensor& query,
                            const c10::SymInt& length, const c10::SymInt& length_kv,
                            bool with_sinks) {
  MaskTensors tensors;
  if (options.alibi_slopes) {
    tensors.alibi_slopes = options.alibi_slopes->to(at::kFloat).contiguous();
  }
  if (with_sinks && options.sinks) tensors.sinks = options.sinks->to(at::kFloat).contiguous();
  if (options.dropout_p > 0) {
    tensors.rng_state = options.rng_state
                            ? options.rng_state->contiguous()
                            : attention_rng_state_op().call({query, length, length_kv});
  }
  return tensors;
}

template <class Params, class Tensors>
void SdpaPointers::add_inputs(const Params& params, Tensors& tensors) {
  for (const auto* tensor : {&tensors.query, &tensors.key, &tensors.value}) {
    all.push_back(read(*tensor));
  }
  all.push_back(&tensors.scale);
  if (params.mask.has_softcap) all.push_back(&tensors.softcap);
  for (const auto* tensor : {&tensors.mask.bias, &tensors.mask.alibi_slopes, &tensors.mask.sinks}) {
    if (tensor->defined()) all.push_back(read(*tensor));
  }
  if (tensors.mask.rng_state.defined()) {
    auto* state = static_cast<int64_t*>(read(tensors.mask.rng_state));
    all.push_back(state);
    all.push_back(state + 1);
  }
}

void SdpaPointers::write(const at::Tensor& tensor) {
  written.push_back({all.size(), tensor.nbytes()});
  all.push_back(tensor.mutable_data_ptr());
}

template <class Params>
void SdpaPointers::add_forward(const Params& params, SdpaForwardTensors& tensors) {
  add_inputs(params, tensors);
  write(tensors.out);
  if (params.with_lse) write(tensors.lse);
  if (params.mask.sequences == Sequences::kLengths) {
    all.push_back(read(tensors.mask.lengths));
    all.push_back(read(tensors.mask.lengths_kv));
  }
}

SdpaPointers::SdpaPointers(const SdpaForwardParams& params, SdpaForwardTensors& tensors) {
  add_forward(params, tensors);
}

SdpaPointers::SdpaPointers(const SdpaFp8Params& params, SdpaFp8Tensors& tensors) {
  add_forward(params, tensors);
  if (params.mask.sequences != Sequences::kRagged) add_numbers(tensors);
}

void SdpaPointers::add_numbers(const SdpaFp8Tensors& tensors) {
  for (const at::Tensor& number : tensors.numbers) all.push_back(read(number));
  for (const at::Tensor& number : tensors.amax) write(number);
}

SdpaPointers::SdpaPointers(const PagedParams& params, SdpaForwardTensors& tensors) {
  add_forward(params, tensors);
  written.clear();  // one plan for many lengths: its engine is not measured at one of them
}

SdpaPointers::SdpaPointers(const SdpaBackwardParams& params, SdpaBackwardTensors& tensors) {
  add_inputs(params, tensors);
  for (const auto* tensor : {&tensors.out, &tensors.lse, &tensors.grad_out}) {
    all.push_back(read(*tensor));
  }
  for (const auto* tensor : {&tensors.grad_query, &tensors.grad_key, &tensors.grad_value}) {
    write(*tensor);
  }
  if (tensors.grad_bias.defined()) write(tensors.grad_bias);
  if (params.mask.sequences == Sequences::kLengths) {
    all.push_back(read(tensors.mask.lengths));
    all.push_back(read(tensors.mask.lengths_kv));
  }
}

}  // namespace cudnn_ops
