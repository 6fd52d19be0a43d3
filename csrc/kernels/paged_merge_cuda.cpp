#include "kernels/paged_merge.h"

#include "paged_merge_images.h"
#include "kernels/device_kernel.h"

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

// As in paged_merge.cu.
struct Merge {
  const void *query, *key_cache, *value_cache;
  const int *page_table, *seq_lens_kv;
  const float* sinks;
  const void* partial_out;
  const float* partial_lse;
  void* out;
  float* lse;
  long long query_batch, query_token, query_head;
  long long key_page, key_slot, key_head, value_page, value_slot, value_head, table_row;
  unsigned batch, queries, heads_kv, group;
  int size, value_size, page_size, hidden;
  float scale, softcap;
};

// By dtype, half or bfloat16, and by head size: up to 128, up to 256, any.
const DeviceKernel& kernel_of(at::ScalarType dtype, int64_t size) {
  static const std::array<std::array<DeviceKernel, 3>, 2> all{
      {{{{kPagedMergeImages, "paged_merge_half_128"},
         {kPagedMergeImages, "paged_merge_half_256"},
         {kPagedMergeImages, "paged_merge_half_any"}}},
       {{{kPagedMergeImages, "paged_merge_bfloat16_128"},
         {kPagedMergeImages, "paged_merge_bfloat16_256"},
         {kPagedMergeImages, "paged_merge_bfloat16_any"}}}}};
  return all[dtype == at::kBFloat16][size <= 128 ? 0 : size <= 256 ? 1 : 2];
}

}  // namespace

void merge_paged(const Paged& args, const at::Tensor& query, float scale,
                 const PartialAttention& partial, const at::Tensor& out, const at::Tensor& lse) {
  constexpr int64_t kThreads = 128, kWarp = 32;
  const auto &keys = args.key_cache, &values = args.value_cache;
  const at::Tensor table =
      args.page_table.stride(1) == 1 ? args.page_table : args.page_table.contiguous();
  const at::Tensor lens = args.seq_lens_kv.contiguous();
  const at::Tensor sinks = args.sinks ? args.sinks->to(at::kFloat).contiguous() : at::Tensor();
  const int64_t slot_dim = args.token_dim(), head_dim = args.head_dim();
  const int64_t heads = query.size(2), heads_kv = keys.size(head_dim);
  const auto narrow = [](int64_t number) { return static_cast<int>(number); };
  const auto whole = [](int64_t number) { return static_cast<unsigned>(number); };
  Merge merge{query.const_data_ptr(),
              keys.const_data_ptr(),
              values.const_data_ptr(),
              table.const_data_ptr<int>(),
              lens.const_data_ptr<int>(),
              sinks.defined() ? sinks.const_data_ptr<float>() : nullptr,
              partial.out.const_data_ptr(),
              partial.lse.const_data_ptr<float>(),
              out.mutable_data_ptr(),
              lse.defined() ? lse.mutable_data_ptr<float>() : nullptr,
              query.stride(0),
              query.stride(1),
              query.stride(2),
              keys.stride(0),
              keys.stride(slot_dim),
              keys.stride(head_dim),
              values.stride(0),
              values.stride(slot_dim),
              values.stride(head_dim),
              table.stride(0),
              whole(query.size(0)),
              whole(query.size(1)),
              whole(heads_kv),
              whole(heads / heads_kv),
              narrow(query.size(3)),
              narrow(values.size(3)),
              narrow(keys.size(slot_dim)),
              narrow(partial.hidden),
              scale,
              static_cast<float>(args.softcap)};
  std::array<void*, 1> arguments{&merge};
  const int64_t warps = query.size(0) * query.size(1) * heads;
  kernel_of(query.scalar_type(), std::max(query.size(3), values.size(3)))
      .launch((warps * kWarp + kThreads - 1) / kThreads, 1, kThreads, arguments.data());
}

}  // namespace cudnn_ops
