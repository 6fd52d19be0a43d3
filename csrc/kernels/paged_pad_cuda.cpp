#include "kernels/paged_pad.h"

#include "paged_pad_images.h"
#include "kernels/device_kernel.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_ops {

PaddedTable pad_table(const at::Tensor& page_table, const at::Tensor& seq_lens_kv,
                      const TablePadding& padding) {
  constexpr int kThreads = 128;
  static const DeviceKernel kernel(kPagedPadImages, "paged_pad");
  const auto empty = [&](at::IntArrayRef sizes) -> at::Tensor {
    return at::detail::empty_cuda(sizes, at::kInt, page_table.device(), std::nullopt);
  };
  PaddedTable padded{empty({padding.batch, padding.width}), empty({padding.batch}),
                     empty({padding.batch})};
  const at::Tensor lens = seq_lens_kv.contiguous();
  const at::Tensor table = page_table.stride(1) == 1 ? page_table : page_table.contiguous();
  const auto* from_table = table.const_data_ptr<int>();
  const auto* from_lens = lens.const_data_ptr<int>();
  auto* to_table = padded.page_table.mutable_data_ptr<int>();
  auto* to_lens = padded.seq_lens_kv.mutable_data_ptr<int>();
  auto* to_queries = padded.seq_lens_q.mutable_data_ptr<int>();
  long long row_stride = table.stride(0);
  auto batch = static_cast<int>(table.size(0)), width = static_cast<int>(table.size(1));
  auto page_size = static_cast<int>(padding.page_size), hidden = static_cast<int>(padding.hidden);
  auto to_width = static_cast<int>(padding.width), queries = static_cast<int>(padding.queries);
  constexpr int64_t kAll = std::numeric_limits<int>::max();
  auto most = static_cast<int>(padding.most < 0 ? kAll : std::min(padding.most, kAll));
  std::array<void*, 13> arguments{&from_table, &row_stride, &from_lens, &batch,    &width,
                                  &page_size,  &hidden,     &most,      &to_width, &to_table,
                                  &to_lens,    &queries,    &to_queries};
  kernel.launch(padding.batch, 1, kThreads, arguments.data());
  return padded;
}

}  // namespace cudnn_ops
