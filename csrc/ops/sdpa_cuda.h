// What attention's CUDA kernels share: the tensors of a call, and how it is described to a plan.
#pragma once

#include "sdpa.h"

#include "../graph/cuda_call.h"

namespace cudnn_ops {

struct SdpaForwardTensors {
  const at::Tensor &query, &key, &value;
  const at::Tensor &out, &lse;  // written; lse may be undefined
};

struct SdpaBackwardTensors {
  const at::Tensor &query, &key, &value, &out, &lse, &grad_out;
  const at::Tensor &grad_query, &grad_key, &grad_value;  // written
};

// Runs the problem on its family's polymorphic plan, repacking what offsets cannot address.
// False, with nothing done, when the policy or cuDNN wants an exact plan (sdpa_ragged_cuda.cpp).
bool run_ragged(const SdpaForwardParams& params, const graph::PlanKey& exact,
                const SdpaForwardTensors& tensors, float* scale);
bool run_ragged(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                const SdpaBackwardTensors& tensors, float* scale);

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
