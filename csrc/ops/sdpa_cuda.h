// What attention's CUDA kernels share: the tensors of a call, and how it is described to a plan.
#pragma once

#include "sdpa.h"

#include "../graph/cuda_call.h"

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

struct SdpaForwardTensors {
  const at::Tensor &query, &key, &value;
  const at::Tensor &out, &lse;  // written; lse may be undefined
};

struct SdpaBackwardTensors {
  const at::Tensor &query, &key, &value, &out, &lse, &grad_out;
  const at::Tensor &grad_query, &grad_key, &grad_value;  // written
};

// Int32 [B] on the device: how many of each sequence's queries and keys there are.
struct SequenceLengths {
  const at::Tensor &query, &key;
};

// Runs the problem on its family's polymorphic plan, repacking what offsets cannot address
// (sdpa_ragged_cuda.cpp). False, with nothing done, when the policy or cuDNN wants an exact plan.
bool run_ragged(const SdpaForwardParams& params, const graph::PlanKey& exact,
                const SdpaForwardTensors& tensors, float* scale);
bool run_ragged(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                const SdpaBackwardTensors& tensors, float* scale);

// The same whatever the policy is, with lengths that are read when the plan runs. What lies
// beyond them becomes 0, and -inf in the log-sum-exp. Raises when cuDNN has no such plan.
void run_padded(const SdpaForwardParams& params, const SdpaForwardTensors& tensors,
                const SequenceLengths& lengths, float* scale);
void run_padded(const SdpaBackwardParams& params, const SdpaBackwardTensors& tensors,
                const SequenceLengths& lengths, float* scale);

inline graph::Call forward_call(c10::ArrayRef<void*> pointers,
                                c10::ArrayRef<graph::Call::Written> written) {
  return {"cudnn_ops.sdpa",
          "`python -m cudnn_ops explain sdpa` shows what cuDNN takes on a GPU; "
          "torch.nn.functional.scaled_dot_product_attention has kernels for the rest",
          pointers, written};
}

inline graph::Call backward_call(c10::ArrayRef<void*> pointers,
                                 c10::ArrayRef<graph::Call::Written> written) {
  return {"cudnn_ops.sdpa backward",
          "`python -m cudnn_ops explain sdpa_backward` shows what cuDNN takes on a GPU; call the "
          "forward under torch.no_grad(), or use torch.nn.functional.scaled_dot_product_attention",
          pointers, written};
}

// A plan takes plain addresses of what it reads and of what it writes.
inline void* read(const at::Tensor& tensor) {
  return const_cast<void*>(tensor.const_data_ptr());
}

inline void* write(const at::Tensor& tensor) {
  return tensor.mutable_data_ptr();
}

}  // namespace cudnn_ops
