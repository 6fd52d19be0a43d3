#include "ops/attention/paged/paged_choice.h"

#include "kernels/paged_decode.h"

#include <atomic>

namespace cudnn_ops {
namespace {

std::atomic<PagedUse> paged_use = PagedUse::kMeasured;

}  // namespace

void set_paged_use(PagedUse use) {
  paged_use = use;
}

bool is_decoded_by_kernel(const Paged& args) {
  if (args.has_fp8_cache()) return true;
  // cuDNN's decoding was measured to be faster: ours took 1.04 to 1.31 of its time (H100, 11 cases
  // of benchmarks/bench_paged_decode.py).
  return paged_use == PagedUse::kAlways &&
         has_paged_decode(args.query.scalar_type(), args.key_cache.scalar_type(),
                          args.query.size(-1), args.value_cache.size(-1));
}

}  // namespace cudnn_ops
