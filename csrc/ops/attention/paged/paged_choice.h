// Who computes attention over pages: a plan of cuDNN, or our kernel (kernels/paged_decode.h).
#pragma once

#include "ops/attention/paged/paged.h"

namespace cudnn_ops {

// For tests and benchmarks: what our kernel computes of that for which cuDNN has plans too.
// kMeasured, at first: that for which it was measured to be faster.
enum class PagedUse : int64_t { kMeasured, kNever, kAlways };
void set_paged_use(PagedUse use);

// cuDNN has no plan for caches of 8 bits: they are always ours.
bool is_decoded_by_kernel(const Paged& args);

// The same for arguments that were not checked, and for tensors without memory.
bool paged_runs_kernel(const Paged& args);

}  // namespace cudnn_ops
