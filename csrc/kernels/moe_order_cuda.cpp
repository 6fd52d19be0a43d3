#include "kernels/moe_order.h"

#include "kernels/device_kernel.h"
#include "kernels/moe_order_call.h"
#include "moe_order_images.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <limits>

namespace cudnn_ops {
namespace {

constexpr int kThreads = kOrderWarps * 32;
// Up to so many rounds of 32 pairs a warp, a block more costs less than a round more; and each
// block reads the counts of all others.
constexpr int64_t kLeastRounds = 8, kMostBlocks = 256;

struct OrderKernels {
  DeviceKernel count, place;
};

const OrderKernels& kernels_for(at::ScalarType index) {
  static const OrderKernels of_int{{kMoeOrderImages, "moe_count_int"},
                                   {kMoeOrderImages, "moe_place_int"}};
  static const OrderKernels of_long{{kMoeOrderImages, "moe_count_long"},
                                    {kMoeOrderImages, "moe_place_long"}};
  return index == at::kInt ? of_int : of_long;
}

}  // namespace

void order_by_expert(const at::Tensor& experts, int64_t num_experts, const at::Tensor& offsets,
                     const at::Tensor& positions) {
  const at::Tensor pairs = experts.contiguous();
  TORCH_CHECK_VALUE(pairs.numel() <= std::numeric_limits<int32_t>::max(),
                    "cudnn_ops.moe_permute: ", pairs.size(0), " tokens of ", pairs.size(1),
                    " experts each are more than 2^31 - 1 rows");
  const int64_t rounds = std::max(kLeastRounds, divide_up(pairs.numel(), kMostBlocks * kThreads));
  const int64_t blocks = divide_up(pairs.numel(), rounds * kThreads);
  const int64_t groups = num_experts + 1;
  at::Tensor counts;
  if (blocks > 1) {
    counts = at::detail::empty_cuda({blocks, groups}, at::kInt, pairs.device(), std::nullopt);
  }
  MoeOrderCall call{pairs.const_data_ptr(),
                    counts.defined() ? static_cast<unsigned*>(counts.mutable_data_ptr()) : nullptr,
                    static_cast<int*>(offsets.mutable_data_ptr()),
                    static_cast<int*>(positions.mutable_data_ptr()),
                    pairs.numel(),
                    static_cast<unsigned>(groups),
                    static_cast<unsigned>(rounds)};
  const auto of_warps = static_cast<int>(kOrderWarps * groups * int64_t{sizeof(unsigned)});
  const auto of_all = static_cast<int>(groups * int64_t{sizeof(unsigned)});
  const OrderKernels& kernels = kernels_for(pairs.scalar_type());
  void* argument = &call;
  if (blocks > 1) kernels.count.launch(blocks, 1, kThreads, &argument, of_warps);
  kernels.place.launch(blocks, 1, kThreads, &argument, of_warps + of_all);
}

}  // namespace cudnn_ops
