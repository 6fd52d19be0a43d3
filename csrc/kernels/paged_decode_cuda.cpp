#include "kernels/paged_decode.h"

#include "kernels/device_kernel.h"
#include "kernels/paged_decode_call.h"
#include "paged_decode_bfloat16_fp8_images.h"
#include "paged_decode_bfloat16_images.h"
#include "paged_decode_half_fp8_images.h"
#include "paged_decode_half_images.h"
#include "paged_plan_images.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

namespace cudnn_ops {
namespace {

constexpr int kLanes = 32;

// Of a block: more go to other blocks, which read the keys again.
int rows_of(const PagedQueries& queries) {
  const int64_t rows = queries.queries * queries.group;
  return rows <= 8 ? 8 : rows <= 16 ? 16 : 32;
}

// Tensors that a call points to.
struct WorkTensors {
  at::Tensor lens, offsets;
  PagedWork work{};

  explicit WorkTensors(const PagedQueries& queries) : lens(queries.seq_lens_kv.contiguous()) {
    if (queries.cu_seqlens_q) offsets = queries.cu_seqlens_q->to(at::kInt).contiguous();
    const auto narrow = [](int64_t number) { return static_cast<int>(number); };
    work = {lens.const_data_ptr<int>(),
            offsets.defined() ? offsets.const_data_ptr<int>() : nullptr,
            narrow(lens.size(0)),
            offsets.defined() ? 0 : narrow(queries.queries),
            narrow(queries.group),
            narrow(queries.left),
            narrow(queries.right),
            queries.bottom_right ? 1 : 0,
            rows_of(queries)};
  }
};

// Which of a kernel's own counters the calls of the current stream count in, one after the other.
// None is left for the last of many streams; and a captured call may run beside others, whatever
// streams they are on.
std::optional<int> own_counters() {
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return std::nullopt;
  }
  // Not its address, which may be another stream's later.
  unsigned long long stream = 0;
  C10_CUDA_CHECK(cudaStreamGetId(c10::cuda::getCurrentCUDAStream(), &stream));
  const std::pair<int, unsigned long long> key{c10::cuda::current_device(), stream};
  static std::mutex mutex;
  static std::map<std::pair<int, unsigned long long>, int> slots;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = slots.find(key);
  if (known != slots.end()) return known->second;
  const auto count = static_cast<int>(slots.size());
  if (count == kPagedSlots) return std::nullopt;
  slots.emplace(key, count);
  return count;
}

// By size and rows, of a type of query and of cache.
using Kernels = std::array<DeviceKernel, 6>;

// Each waits by itself for what the kernels before it write. `kind` and `end` are of its name.
#define CUDNN_OPS_PAGED(images, kind, name, end) {images, "paged_decode_" kind name end, true}
#define CUDNN_OPS_PAGED_ROWS(images, kind, types, end)         \
  Kernels {                                                    \
    {                                                          \
      CUDNN_OPS_PAGED(images, kind, types "_64_8", end),       \
          CUDNN_OPS_PAGED(images, kind, types "_64_16", end),  \
          CUDNN_OPS_PAGED(images, kind, types "_64_32", end),  \
          CUDNN_OPS_PAGED(images, kind, types "_128_8", end),  \
          CUDNN_OPS_PAGED(images, kind, types "_128_16", end), \
          CUDNN_OPS_PAGED(images, kind, types "_128_32", end)  \
    }                                                          \
  }
#define CUDNN_OPS_PAGED_TYPES(kind, end)                                                  \
  {                                                                                       \
    {CUDNN_OPS_PAGED_ROWS(kPagedDecodeHalfImages, kind, "half_half", end),                \
     CUDNN_OPS_PAGED_ROWS(kPagedDecodeHalfFp8Images, kind, "half_e4m3", end)},            \
    {                                                                                     \
      CUDNN_OPS_PAGED_ROWS(kPagedDecodeBFloat16Images, kind, "bfloat16_bfloat16", end),   \
          CUDNN_OPS_PAGED_ROWS(kPagedDecodeBFloat16Fp8Images, kind, "bfloat16_e4m3", end) \
    }                                                                                     \
  }

// What a call is made of, as far as kernels are chosen by it.
struct Types {
  at::ScalarType query, cache;
  int64_t size;
  int rows;

  int64_t element() const {
    return cache == at::kFloat8_e4m3fn ? 1 : 2;
  }
  const DeviceKernel& of(const Kernels (&kernels)[2][2]) const {
    return kernels[query == at::kBFloat16][element() == 1].at(
        static_cast<size_t>((size == 128 ? 3 : 0) + rows / 16));
  }
};

const DeviceKernel& kernel_of(const Types& types) {
  static const Kernels kernels[2][2] = CUDNN_OPS_PAGED_TYPES("", "");
  return types.of(kernels);
}

// The kernel of clusters.
const DeviceKernel& even_kernel_of(const Types& types, int warps) {
  static const Kernels narrow[2][2] = CUDNN_OPS_PAGED_TYPES("even_", "_4");
  static const Kernels wide[2][2] = CUDNN_OPS_PAGED_TYPES("even_", "_8");
  return types.of(warps == 4 ? narrow : wide);
}
#undef CUDNN_OPS_PAGED_TYPES
#undef CUDNN_OPS_PAGED_ROWS
#undef CUDNN_OPS_PAGED

// Blocks that are on a multiprocessor at once, as far as registers go: as the kernels declare.
// Of 16 bits and size 128 there is no room for more than 3 in shared memory.
int64_t blocks_per_processor(const Types& types) {
  if (types.rows == 8) return types.size == 128 && types.element() == 2 ? 3 : 4;
  return types.size == 128 && types.rows == 32 ? 2 : 3;
}

struct Shared {
  int stages;
  int64_t bytes;
  int64_t blocks;  // that are on a multiprocessor at once
};

// As many tiles on their way as leave room for `most` blocks of a multiprocessor; at the end the
// sums of a warp, float32, are in the place of its tiles. `besides`: bytes for something else.
Shared shared_of(const Types& types, int64_t warps, int64_t most, int64_t besides,
                 const DeviceLimits& limits) {
  constexpr int64_t kReserved = 1024;  // of each block, by the driver
  // Of a row, besides its query: what it is scaled by, which keys it sees, and of each warp the
  // highest score and the sum.
  const int64_t words = 3 + 2 * warps, rows = types.rows, size = types.size;
  const int64_t others = rows * size * 2 + rows * words * 4 + besides;
  const int64_t stage = warps * 2 * kPagedKeys * size * types.element();
  const int64_t sums = warps * rows * size * 4;
  const int64_t least = std::max<int64_t>(2, divide_up(sums, stage));
  const int64_t room = (limits.shared_bytes + kReserved) / most - kReserved;
  // What the kernel declares, filled up to where the tiles may lie.
  constexpr int64_t kDeclared = 128;
  const int64_t fitting = (room - kDeclared - others) / stage;
  const int64_t stages = std::clamp<int64_t>(fitting, least, kPagedMostStages);
  const int64_t bytes = others + stages * stage;
  // Of 16 bits the least number of stages may be more than there is room for. All have equal parts
  // of the work: blocks that wait for others would double its time.
  const int64_t resident = (limits.shared_bytes + kReserved) / (bytes + kDeclared + kReserved);
  return {static_cast<int>(stages), bytes, std::clamp<int64_t>(resident, 1, most)};
}

// How a call is launched.
struct Launch {
  const DeviceKernel* kernel;
  int warps;
  Shared shared;
  int parts;  // blocks of a cluster; 0: there are no clusters
};

Launch equal_shares(const Types& types, const DeviceLimits& limits) {
  return {&kernel_of(types), kPagedWarps,
          shared_of(types, kPagedWarps, blocks_per_processor(types), 0, limits), 0};
}

// With as many parts as have room for the clusters of all pairs at once, up to `most`; fewer than
// `least`: none.
Launch clusters(const Types& types, int warps, int64_t pairs, int64_t least, int64_t most,
                const DeviceLimits& limits) {
  const int64_t rows = types.rows;
  // What blocks put into each other's shared memory: of a block's share of the numbers, by fours,
  // what each has, and the highest scores and the sums of all rows.
  const int64_t besides =
      (rows * types.size / 4 + kPagedMostParts) * 16 + kPagedMostParts * rows * 8;
  const int64_t blocks = warps == kPagedWarps ? blocks_per_processor(types) : 1;
  const Shared shared = shared_of(types, warps, blocks, besides, limits);
  Launch launch{&even_kernel_of(types, warps), warps, shared, 0};
  if (shared.bytes > limits.shared_bytes) return launch;
  for (int64_t parts = most; parts >= least; --parts) {
    const int bytes = static_cast<int>(shared.bytes), count = static_cast<int>(parts);
    if (launch.kernel->resident_clusters(kLanes * warps, bytes, count) >= pairs) {
      launch.parts = count;
      break;
    }
  }
  return launch;
}

// Few pairs of a sequence and a head of keys have clusters, each pair one. The best is one block on
// each multiprocessor, or nearly: where some have more than others, all wait for those. Blocks of 8
// warps are better where there is more to compute for a byte, and of 16 bits and few rows where
// there is one on every multiprocessor. The longest sequence says when clusters end; so there is a
// `reach`, of tokens of a page table's line, from which on equal shares take less time where
// lengths are unlike. All of it was measured on an H200.
Launch choose(const Types& types, const PagedWork& work, int64_t pairs, int64_t reach,
              const DeviceLimits& limits) {
  constexpr int kLeastSm = 90, kMore = 2 * kPagedWarps;
  constexpr int64_t kFewParts = 3, kReach = 8192, kReachOfMore = 16384, kReachOfTwoEach = 4096;
  const Launch shares = equal_shares(types, limits);
  const bool is_one_block = work.cu_seqlens_q == nullptr && work.queries * work.group <= work.rows;
  if (limits.sm_version < kLeastSm || !is_one_block || work.left >= 0 || reach == 0) return shares;
  const bool is_light = types.rows == 8 && types.element() == 2;
  const int64_t one_each = std::min<int64_t>(limits.processors / pairs, kPagedMostParts);
  Launch found{};
  if (one_each >= 2) {
    const bool is_full = one_each == 2 && 10 * one_each * pairs >= 9 * limits.processors;
    const int warps = is_light && !is_full ? kPagedWarps : kMore;
    found = clusters(types, warps, pairs, 2, one_each, limits);
    const int64_t most = warps == kMore ? kReachOfMore : kReach;
    if (found.parts <= kFewParts && !is_full && reach > most) return shares;
  } else {
    // Two on some multiprocessors. With room for three the first ones would get them.
    const int64_t most = is_light ? limits.processors * 3 / 4 : limits.processors;
    if (pairs > most || reach > kReachOfTwoEach) return shares;
    found = clusters(types, kPagedWarps, pairs, 2, 2, limits);
  }
  return found.parts > 0 ? found : shares;
}

// 0 for one number, whose stride means nothing.
int step_of(const std::optional<at::Tensor>& descale) {
  return descale && descale->numel() > 1 ? static_cast<int>(descale->stride(0)) : 0;
}

const float* data_of(const std::optional<at::Tensor>& numbers) {
  return numbers ? numbers->const_data_ptr<float>() : nullptr;
}

void point_to(PagedDecodeCall& call, const PagedDecode& args, const at::Tensor& out,
              const at::Tensor& lse) {
  const auto &query = args.query, &keys = args.key_cache, &values = args.value_cache;
  const int64_t slot_dim = args.head_major ? 2 : 1, head_dim = args.head_major ? 1 : 2;
  const bool is_packed = query.dim() == 3;
  call.query = query.const_data_ptr();
  call.query_batch = is_packed ? 0 : query.stride(0);
  call.query_token = query.stride(-3);
  call.query_head = query.stride(-2);
  call.key_cache = keys.const_data_ptr();
  call.key_page = keys.stride(0);
  call.key_slot = keys.stride(slot_dim);
  call.key_head = keys.stride(head_dim);
  call.value_cache = values.const_data_ptr();
  call.value_page = values.stride(0);
  call.value_slot = values.stride(slot_dim);
  call.value_head = values.stride(head_dim);
  call.heads_kv = static_cast<int>(keys.size(head_dim));
  while (int64_t{1} << call.page_shift < keys.size(slot_dim)) ++call.page_shift;
  call.out = out.mutable_data_ptr();
  call.out_token = query.size(-2) * query.size(-1);
  if (lse.defined()) {
    call.lse = lse.mutable_data_ptr<float>();
    call.lse_batch = is_packed ? 0 : lse.stride(0);
    call.lse_head = lse.stride(-2);
    call.lse_token = lse.stride(-1);
  }
}

}  // namespace

at::Tensor make_paged_plan(const PagedQueries& queries) {
  static const DeviceKernel kernel(kPagedPlanImages, "paged_plan");
  constexpr int64_t kMostThreads = 1024, kWarp = 32;
  const WorkTensors tensors(queries);
  const int64_t batch = tensors.lens.size(0);
  const at::Tensor plan = at::detail::empty_cuda({batch + kPagedSums + 1}, at::kInt,
                                                 tensors.lens.device(), std::nullopt);
  PagedPlanCall call{tensors.work, plan.mutable_data_ptr<int>()};
  const int64_t threads = std::clamp(divide_up(batch, kWarp) * kWarp, int64_t{128}, kMostThreads);
  void* argument = &call;
  kernel.launch(1, 1, static_cast<int>(threads), &argument);
  return plan;
}

void decode_pages(const PagedQueries& queries, const PagedDecode& args,
                  const std::optional<at::Tensor>& given, const at::Tensor& out,
                  const at::Tensor& lse) {
  const WorkTensors tensors(queries);
  PagedDecodeCall call{};
  call.work = tensors.work;
  const int64_t size = args.query.size(-1);
  const int rows = rows_of(queries);
  constexpr int64_t kMostLines = 1 << 12;  // to be fetched early: of few sequences
  const DeviceLimits limits = current_limits();
  const Types types{args.query.scalar_type(), args.key_cache.scalar_type(), size, rows};
  const int64_t pairs = tensors.work.batch * args.key_cache.size(args.head_major ? 1 : 2);
  const int64_t reach = args.page_table.size(1) * args.key_cache.size(args.head_major ? 2 : 1);
  const Launch launch = choose(types, tensors.work, pairs, reach, limits);
  call.parts = launch.parts;
  int64_t blocks = launch.parts * pairs;
  std::optional<at::Tensor> plan = given;
  at::Tensor partials;
  if (call.parts == 0) {
    blocks = std::min<int64_t>(kPagedMostBlocks, limits.processors * launch.shared.blocks);
    std::optional<int> slot;
    if (!plan && tensors.work.batch <= kPagedCounted) slot = own_counters();
    if (!plan && !slot) plan = make_paged_plan(queries);
    call.slot = slot.value_or(0);
    call.counters = plan ? plan->mutable_data_ptr<int>() : nullptr;
    call.plan = call.counters;
    partials = at::detail::empty_cuda({2 * blocks, rows * (size + 2)}, at::kFloat,
                                      args.query.device(), std::nullopt);
    call.partials = partials.mutable_data_ptr<float>();
  }
  const at::Tensor table =
      args.page_table.stride(1) == 1 ? args.page_table : args.page_table.contiguous();
  const std::optional<at::Tensor> sinks =
      args.sinks ? std::optional(args.sinks->to(at::kFloat).contiguous()) : std::nullopt;
  point_to(call, args, out, lse);
  call.page_table = table.const_data_ptr<int>();
  call.table_row = table.stride(0);
  call.table_width = static_cast<int>(table.size(1));
  const int64_t table_bytes =
      ((table.size(0) - 1) * table.stride(0) + table.size(1)) * static_cast<int64_t>(sizeof(int));
  call.table_lines = static_cast<int>(std::min<int64_t>(table_bytes / kPagedLine, kMostLines));
  call.descale_k = data_of(args.descale_k);
  call.descale_v = data_of(args.descale_v);
  call.descale_k_step = step_of(args.descale_k);
  call.descale_v_step = step_of(args.descale_v);
  call.sinks = data_of(sinks);
  call.stages = launch.shared.stages;
  call.scale = args.scale;
  call.softcap = args.softcap;
  void* argument = &call;
  launch.kernel->launch(blocks, 1, kLanes * launch.warps, &argument,
                        static_cast<int>(launch.shared.bytes), std::max(launch.parts, 1));
}

}  // namespace cudnn_ops
