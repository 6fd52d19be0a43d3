#include "kernels/paged_merge.h"

#include "kernels/device_kernel.h"
#include "kernels/paged_merge_call.h"
#include "paged_merge_images.h"

#include <algorithm>
#include <array>

namespace cudnn_ops {
namespace {

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

void merge_paged(const PagedMerge& args, const PartialAttention& partial, const at::Tensor& out,
                 const at::Tensor& lse) {
  constexpr int64_t kThreads = 128, kWarp = 32;
  const auto &query = args.query, &keys = args.key_cache, &values = args.value_cache;
  const at::Tensor table =
      args.page_table.stride(1) == 1 ? args.page_table : args.page_table.contiguous();
  const at::Tensor lens = args.seq_lens_kv.contiguous();
  const at::Tensor sinks = args.sinks ? args.sinks->to(at::kFloat).contiguous() : at::Tensor();
  const int64_t slot_dim = args.head_major ? 2 : 1, head_dim = args.head_major ? 1 : 2;
  const int64_t heads = query.size(2), heads_kv = keys.size(head_dim);
  const auto narrow = [](int64_t number) { return static_cast<int>(number); };
  const auto whole = [](int64_t number) { return static_cast<unsigned>(number); };
  PagedMergeCall call{query.const_data_ptr(),
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
                      args.scale,
                      args.softcap};
  void* argument = &call;
  const int64_t warps = query.size(0) * query.size(1) * heads;
  kernel_of(query.scalar_type(), std::max(query.size(3), values.size(3)))
      .launch((warps * kWarp + kThreads - 1) / kThreads, 1, kThreads, &argument);
}

}  // namespace cudnn_ops
