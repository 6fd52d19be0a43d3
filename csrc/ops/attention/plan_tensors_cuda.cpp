// The mask's tensors as cuDNN reads them, and a plan's list of addresses.

#include "ops/attention/plan_tensors_cuda.h"
#include "ops/attention/dense/sdpa_problem.h"

#include <ATen/ops/full.h>

namespace cudnn_ops {
namespace {

at::Tensor lengths_of(const OptionalTensor& lengths, const at::Tensor& like) {
  if (lengths) return lengths->to(at::kInt).contiguous();
  return at::full({like.size(0)}, like.size(2), like.options().dtype(at::kInt));
}

void* read(const at::Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());
}

}  // namespace

MaskTensors::MaskTensors(const Attention& args, const Band& band, bool backward)
    : bias(bias_of(args, band, backward)) {
  if (args.alibi_slopes && !has_slopes_in_bias(args, band, backward)) {
    alibi_slopes = args.alibi_slopes->to(at::kFloat).contiguous();
  }
  if (args.sinks && !backward) sinks = args.sinks->to(at::kFloat).contiguous();
  if (args.dropout_p > 0) {
    rng_state = args.rng_state ? args.rng_state->contiguous()
                               : attention_rng_state_op().call(args.query, args.query.sym_size(2),
                                                               args.key.sym_size(2));
  }
  if (needs_lengths(args, band, backward)) {
    lengths = lengths_of(args.seq_lens_q, args.query);
    const bool are_alike = !is_padded(args) && args.query.size(2) == args.key.size(2);
    lengths_kv = are_alike ? lengths : lengths_of(args.seq_lens_kv, args.key);
  }
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
