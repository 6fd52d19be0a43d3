// What attention's CUDA kernels share: the tensors of a call as a plan takes them.
#pragma once

#include "ops/attention/dense/sdpa.h"
#include "ops/attention/band.h"
#include "ops/attention/paged/paged_params.h"
#include "ops/attention/attention_params.h"

#include "graph/cuda_call.h"

#include <c10/util/SmallVector.h>

#include <limits>

namespace cudnn_ops {

// An uninitialized dense tensor whose dimensions lie in memory in the order of those of `like`.
at::Tensor empty_like_order(c10::IntArrayRef sizes, const at::Tensor& like);

// The tensor itself when cuDNN can address it, else a dense copy in the memory order of `like`.
at::Tensor addressable(const at::Tensor& tensor, const at::Tensor& like,
                       int64_t max_extent = std::numeric_limits<int64_t>::max());

// cuDNN takes the maximum of the scores before it scales them, so a scale that is not positive
// overflows or gives NaN. Such a scale is folded into the query: scale * q == scale' * (sign * q)
// with scale' > 0 and sign -1 or 0, both of which are exact.
struct Scale {
  float value;
  double query_sign;  // 1: leave the query alone

  Scale(std::optional<double> scale, const at::Tensor& query);
  at::Tensor applied_to(const at::Tensor& query) const;
};

// The mask of a call: what a plan bakes in of it, and what it reads. Undefined: there is none.
struct MaskTensors {
  at::Tensor bias, alibi_slopes, sinks, rng_state;
  at::Tensor lengths, lengths_kv;  // int32 [B] on the device

  MaskTensors() = default;
  MaskTensors(const Attention& args, const Band& band, bool backward);
};

// What a plan reads, `scale` and `softcap` from the host, and writes. Undefined where it does not.
struct SdpaForwardTensors {
  at::Tensor query, key, value;
  MaskTensors mask;
  float scale, softcap;
  at::Tensor out, lse;
};

struct SdpaBackwardTensors {
  at::Tensor query, key, value, out, lse, grad_out;
  MaskTensors mask;
  float scale, softcap;
  at::Tensor grad_query, grad_key, grad_value, grad_bias;
};

// The addresses in the order that plans take them (sdpa_graph.cpp), but for a ragged one's table.
struct SdpaPointers {
  c10::SmallVector<void*, 40> all;
  c10::SmallVector<graph::Call::Written, 4> written;

  SdpaPointers(const SdpaForwardParams& params, SdpaForwardTensors& tensors);
  SdpaPointers(const SdpaBackwardParams& params, SdpaBackwardTensors& tensors);
  // Without the page table, which comes last, after the offsets and lengths of a ragged one.
  SdpaPointers(const PagedParams& params, SdpaForwardTensors& tensors);

 private:
  template <class Params, class Tensors>
  void add_inputs(const Params& params, Tensors& tensors);
  template <class Params>
  void add_forward(const Params& params, SdpaForwardTensors& tensors);
  void write(const at::Tensor& tensor);
};

// Runs the problem on its family's polymorphic plan, repacking what offsets cannot address
// (sdpa_ragged_cuda.cpp), with `band` in place of the exact one. False, with nothing done, when the
// policy or cuDNN wants an exact plan.
bool run_ragged(const SdpaForwardParams& params, const graph::PlanKey& exact,
                const SdpaForwardTensors& tensors, const Band& band);
bool run_ragged(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                const SdpaBackwardTensors& tensors, const Band& band);

inline graph::Call forward_call(const SdpaPointers& pointers) {
  return {"cudnn_ops.sdpa",
          "`python -m cudnn_ops explain sdpa` shows what cuDNN takes on a GPU; "
          "torch.nn.functional.scaled_dot_product_attention has kernels for the rest",
          pointers.all, pointers.written};
}

inline graph::Call backward_call(const SdpaPointers& pointers) {
  return {"cudnn_ops.sdpa backward",
          "`python -m cudnn_ops explain sdpa_backward` shows what cuDNN takes on a GPU; call the "
          "forward under torch.no_grad(), or use torch.nn.functional.scaled_dot_product_attention",
          pointers.all, pointers.written};
}

inline graph::Call varlen_call(const SdpaPointers& pointers) {
  return {"cudnn_ops.varlen_attention",
          "`python -m cudnn_ops support` shows what cuDNN takes on a GPU; "
          "torch.nn.attention.varlen has kernels for the rest",
          pointers.all, pointers.written};
}

inline graph::Call varlen_backward_call(const SdpaPointers& pointers) {
  return {"cudnn_ops.varlen_attention backward",
          "`python -m cudnn_ops support` shows what cuDNN takes on a GPU; call the forward under "
          "torch.no_grad(), or use torch.nn.attention.varlen",
          pointers.all, pointers.written};
}

}  // namespace cudnn_ops
