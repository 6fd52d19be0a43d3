#include "kernels/attention_merge.h"

#include "attention_merge_images.h"
#include "kernels/attention_merge_call.h"
#include "kernels/device_kernel.h"
#include "kernels/tensor_rows.h"

namespace cudnn_ops {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kWidth = 8;

const DeviceKernel& kernel_of(at::ScalarType dtype, bool is_widened, bool is_wide) {
#define CUDNN_OPS_MERGE(type)                                 \
  {                                                           \
    {kAttentionMergeImages, "attention_merge_" type "_1"},    \
        {kAttentionMergeImages, "attention_merge_" type "_8"} \
  }
  static const DeviceKernel kernels[2][2][2] = {
      {CUDNN_OPS_MERGE("half"), CUDNN_OPS_MERGE("half_float")},
      {CUDNN_OPS_MERGE("bfloat16"), CUDNN_OPS_MERGE("bfloat16_float")}};
#undef CUDNN_OPS_MERGE
  return kernels[type_index(dtype)][is_widened][is_wide];
}

}  // namespace

void merge_attention(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
                     const at::Tensor& part_lse) {
  const bool is_wide = out.size(3) % kWidth == 0 && are_rows_aligned(out) && are_rows_aligned(part);
  const int64_t rows = lse.numel();
  AttentionMergeCall call{out.mutable_data_ptr(),
                          lse.mutable_data_ptr<float>(),
                          part.const_data_ptr(),
                          part_lse.const_data_ptr<float>(),
                          out.stride(0),
                          out.stride(1),
                          out.stride(2),
                          lse.stride(0),
                          lse.stride(1),
                          lse.stride(2),
                          part.stride(0),
                          part.stride(1),
                          part.stride(2),
                          part_lse.stride(0),
                          part_lse.stride(1),
                          part_lse.stride(2),
                          static_cast<unsigned>(out.size(1)),
                          static_cast<unsigned>(out.size(2)),
                          static_cast<unsigned>(rows),
                          static_cast<int>(out.size(3) / (is_wide ? kWidth : 1))};
  void* argument = &call;
  kernel_of(part.scalar_type(), out.scalar_type() != part.scalar_type(), is_wide)
      .launch(divide_up(rows * kAttentionMergeLanes, kThreads), 1, kThreads, &argument);
}

}  // namespace cudnn_ops
