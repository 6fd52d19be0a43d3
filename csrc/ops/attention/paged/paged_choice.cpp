#include "ops/attention/paged/paged_choice.h"

#include "kernels/paged_decode.h"

#include <atomic>

namespace cudnn_ops {
namespace {

std::atomic<PagedUse> paged_use = PagedUse::kMeasured;

// One query of each sequence: up to how many sequences our kernel decodes, and from how many tokens
// on that a page table reaches. Measured on an H200 (benchmarks/bench_paged_decode.py): of unlike
// lengths cuDNN's took 1.1 to 1.5 times as long, of one length 0.97 to 1.15 times, and of 512
// tokens 0.85 to 0.98.
constexpr int64_t kMostSequences = 64, kLeastReach = 2048;

// As many rows, queries times the heads of a group, as the kernel takes at once. It was measured to
// be faster than cuDNN's with its copies for several queries of each sequence: 4 and 8 of 64
// sequences took 0.97 and 0.87 of the time (H200, benchmarks/bench_paged_decode.py), and half the
// host's.
bool is_faster(const Paged& args) {
  constexpr int64_t kMostRows = 32;
  const int64_t heads = args.query.size(-2), heads_kv = args.key_cache.size(args.head_dim());
  const int64_t queries = args.is_packed() ? args.max_seqlen_q.expect_int() : args.query.size(1);
  if (heads_kv == 0 || queries * (heads / heads_kv) > kMostRows) return false;
  const int64_t reach = args.page_table.size(1) * args.key_cache.size(args.token_dim());
  return queries > 1 || (args.page_table.size(0) <= kMostSequences && reach >= kLeastReach);
}

}  // namespace

void set_paged_use(PagedUse use) {
  paged_use = use;
}

bool is_decoded_by_kernel(const Paged& args) {
  if (args.has_fp8_cache()) return true;
  if (!has_paged_decode(args.query.scalar_type(), args.key_cache.scalar_type(), args.query.size(-1),
                        args.value_cache.size(-1))) {
    return false;
  }
  return paged_use == PagedUse::kAlways || (paged_use == PagedUse::kMeasured && is_faster(args));
}

bool paged_runs_kernel(const Paged& args) {
  check_paged(args);
  return is_decoded_by_kernel(args);
}

}  // namespace cudnn_ops
