// What the CUDA kernels of dense attention share: forward, backward and polymorphic plans.
#pragma once

#include "ops/attention/band.h"
#include "ops/attention/dense/sdpa.h"
#include "ops/attention/plan_tensors_cuda.h"

namespace cudnn_ops {

MaskTensors mask_tensors_of(const Sdpa& args, const Band& band, bool backward);

// Runs the problem on its family's polymorphic plan, repacking what offsets cannot address, with
// `band` in place of the exact one. False, with nothing done, when the policy or cuDNN wants an
// exact plan.
bool run_polymorphic(const SdpaForwardParams& params, const graph::PlanKey& exact,
                     const SdpaForwardTensors& tensors, const Band& band);
bool run_polymorphic(const SdpaBackwardParams& params, const graph::PlanKey& exact,
                     const SdpaBackwardTensors& tensors, const Band& band);

constexpr CallName kSdpaCall{
    "cudnn_ops.sdpa",
    "`python -m cudnn_ops explain sdpa` shows what cuDNN supports on a GPU; "
    "torch.nn.functional.scaled_dot_product_attention has kernels for the rest"};
constexpr CallName kSdpaBackwardCall{
    "cudnn_ops.sdpa backward",
    "`python -m cudnn_ops explain sdpa_backward` shows what cuDNN supports on a GPU; call the "
    "forward under torch.no_grad(), or use torch.nn.functional.scaled_dot_product_attention"};

}  // namespace cudnn_ops
