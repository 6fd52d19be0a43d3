// Attention over pages by our kernel, on CUDA.
#pragma once

#include "ops/attention/paged/paged.h"

namespace cudnn_ops {

// Writes `out`, of the result's sizes and contiguous, and where it is defined `lse`. There is a
// page, and something to write.
void decode_by_kernel(const Paged& args, const at::Tensor& out, const at::Tensor& lse);

}  // namespace cudnn_ops
