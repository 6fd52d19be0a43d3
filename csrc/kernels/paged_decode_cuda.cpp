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

constexpr int kThreads = 32 * kPagedWarps;

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

// By rows, of a type of query and of cache.
using Kernels = std::array<DeviceKernel, 6>;

// Each waits by itself for what the kernels before it write.
#define CUDNN_OPS_PAGED_DECODE(images, name) {images, "paged_decode_" name, true}
#define CUDNN_OPS_PAGED_DECODES(images, name)                                                      \
  Kernels {                                                                                        \
    {                                                                                              \
      CUDNN_OPS_PAGED_DECODE(images, name "_64_8"), CUDNN_OPS_PAGED_DECODE(images, name "_64_16"), \
          CUDNN_OPS_PAGED_DECODE(images, name "_64_32"),                                           \
          CUDNN_OPS_PAGED_DECODE(images, name "_128_8"),                                           \
          CUDNN_OPS_PAGED_DECODE(images, name "_128_16"),                                          \
          CUDNN_OPS_PAGED_DECODE(images, name "_128_32")                                           \
    }                                                                                              \
  }

#define CUDNN_OPS_PAGED_EVEN(images, name)             \
  {CUDNN_OPS_PAGED_DECODE(images, "even_" name "_64"), \
   CUDNN_OPS_PAGED_DECODE(images, "even_" name "_128")}

const DeviceKernel& kernel_of(at::ScalarType query, at::ScalarType cache, int64_t size, int rows) {
  static const Kernels kernels[2][2] = {
      {CUDNN_OPS_PAGED_DECODES(kPagedDecodeHalfImages, "half_half"),
       CUDNN_OPS_PAGED_DECODES(kPagedDecodeHalfFp8Images, "half_e4m3")},
      {CUDNN_OPS_PAGED_DECODES(kPagedDecodeBFloat16Images, "bfloat16_bfloat16"),
       CUDNN_OPS_PAGED_DECODES(kPagedDecodeBFloat16Fp8Images, "bfloat16_e4m3")}};
  const auto& all = kernels[query == at::kBFloat16][cache == at::kFloat8_e4m3fn];
  return all.at(static_cast<size_t>((size == 128 ? 3 : 0) + rows / 16));
}

// The kernel of clusters.
const DeviceKernel& even_kernel_of(at::ScalarType query, at::ScalarType cache, int64_t size) {
  static const DeviceKernel kernels[2][2][2] = {
      {CUDNN_OPS_PAGED_EVEN(kPagedDecodeHalfImages, "half_half"),
       CUDNN_OPS_PAGED_EVEN(kPagedDecodeHalfFp8Images, "half_e4m3")},
      {CUDNN_OPS_PAGED_EVEN(kPagedDecodeBFloat16Images, "bfloat16_bfloat16"),
       CUDNN_OPS_PAGED_EVEN(kPagedDecodeBFloat16Fp8Images, "bfloat16_e4m3")}};
  return kernels[query == at::kBFloat16][cache == at::kFloat8_e4m3fn][size == 128];
}
#undef CUDNN_OPS_PAGED_EVEN
#undef CUDNN_OPS_PAGED_DECODES
#undef CUDNN_OPS_PAGED_DECODE

// Blocks that are on a multiprocessor at once, as far as registers go: as the kernels declare.
// Of 16 bits and size 128 there is no room for more than 3 in shared memory.
int64_t blocks_per_processor(int64_t size, int64_t element, int rows) {
  if (rows == 8) return size == 128 && element == 2 ? 3 : 4;
  return size == 128 && rows == 32 ? 2 : 3;
}

struct Shared {
  int stages;
  int64_t bytes;
  int64_t blocks;  // that are on a multiprocessor at once
};

// As many tiles on their way as leave room for all blocks of a multiprocessor; at the end the sums
// of a warp, float32, are in the place of its tiles.
Shared shared_of(int64_t size, int64_t element, int rows, const DeviceLimits& limits) {
  constexpr int64_t kReserved = 1024;  // of each block, by the driver
  const int64_t queries = rows * size * 2, words = rows * kPagedRowWords * 4;
  const int64_t stage = kPagedWarps * 2 * kPagedKeys * size * element;
  const int64_t sums = kPagedWarps * rows * size * 4;
  const int64_t least = std::max<int64_t>(2, divide_up(sums, stage));
  const int64_t room =
      (limits.shared_bytes + kReserved) / blocks_per_processor(size, element, rows) - kReserved;
  // What the kernel declares, filled up to where the tiles may lie.
  constexpr int64_t kDeclared = 128;
  const int64_t fitting = (room - kDeclared - queries - words) / stage;
  const int64_t stages = std::clamp<int64_t>(fitting, least, kPagedMostStages);
  const int64_t bytes = queries + words + stages * stage;
  // Of 16 bits the least number of stages may be more than there is room for. All have equal parts
  // of the work: blocks that wait for others would double its time.
  const int64_t resident = (limits.shared_bytes + kReserved) / (bytes + kDeclared + kReserved);
  const int64_t most = blocks_per_processor(size, element, rows);
  return {static_cast<int>(stages), bytes, std::clamp<int64_t>(resident, 1, most)};
}

// Blocks for each pair of a sequence and a head of keys; 0: there are no clusters for such a call,
// or no room for those of all pairs at once, of which some would begin when others have ended.
// `reach`: the most tokens of a sequence.
int parts_of(const PagedWork& work, int64_t heads_kv, int64_t reach, int64_t blocks,
             int shared_bytes, const DeviceLimits& limits, const DeviceKernel& kernel) {
  constexpr int kLeastSm = 90, kParts = kPagedMostParts;
  const int64_t pairs = int64_t{work.batch} * heads_kv;
  const bool ends_behind_all = work.right < 0 || (work.queries == 1 && work.bottom_right != 0);
  const bool is_decoding = work.cu_seqlens_q == nullptr && work.left < 0 && ends_behind_all &&
                           work.queries * work.group <= kPagedEvenRows && reach > 0;
  if (limits.sm_version < kLeastSm || !is_decoding) return 0;
  if (kernel.resident_clusters(kThreads, shared_bytes, kParts) < pairs) return 0;
  // Tiles of a warp, one behind the other: so many more than of equal shares should take no longer
  // than what these need besides. An estimate, of a tile's time and theirs.
  constexpr int64_t kMore = 3;
  const int64_t units = divide_up(reach, kPagedUnit);
  return divide_up(units, kParts) > divide_up(units * pairs, blocks) + kMore ? 0 : kParts;
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
  const Shared shared = shared_of(size, args.key_cache.element_size(), rows, limits);
  const at::ScalarType query_type = args.query.scalar_type();
  const at::ScalarType cache_type = args.key_cache.scalar_type();
  int64_t blocks = std::min<int64_t>(kPagedMostBlocks, limits.processors * shared.blocks);
  const int64_t heads_kv = args.key_cache.size(args.head_major ? 1 : 2);
  const DeviceKernel& even_kernel = even_kernel_of(query_type, cache_type, size);
  const auto shared_bytes = static_cast<int>(shared.bytes);
  const int64_t reach = args.page_table.size(1) * args.key_cache.size(args.head_major ? 2 : 1);
  call.parts = parts_of(tensors.work, heads_kv, reach, blocks, shared_bytes, limits, even_kernel);
  std::optional<at::Tensor> plan = given;
  at::Tensor partials;
  if (call.parts > 0) {
    blocks = call.parts * tensors.work.batch * heads_kv;
  } else {
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
  call.stages = shared.stages;
  call.scale = args.scale;
  call.softcap = args.softcap;
  void* argument = &call;
  const auto& kernel = call.parts > 0 ? even_kernel : kernel_of(query_type, cache_type, size, rows);
  kernel.launch(blocks, 1, kThreads, &argument, shared_bytes, std::max(call.parts, 1));
}

}  // namespace cudnn_ops
