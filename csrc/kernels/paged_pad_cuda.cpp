#include "kernels/paged_pad.h"

#include "kernels/device_kernel.h"
#include "kernels/paged_pad_call.h"
#include "paged_pad_images.h"

#include <ATen/cuda/EmptyTensor.h>

#include <algorithm>
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
  constexpr int64_t kAll = std::numeric_limits<int>::max();
  const auto narrow = [](int64_t number) { return static_cast<int>(number); };
  PagedPadCall call{table.const_data_ptr<int>(),
                    table.stride(0),
                    lens.const_data_ptr<int>(),
                    narrow(table.size(0)),
                    narrow(table.size(1)),
                    narrow(padding.page_size),
                    narrow(padding.hidden),
                    narrow(padding.most < 0 ? kAll : std::min(padding.most, kAll)),
                    narrow(padding.width),
                    padded.page_table.mutable_data_ptr<int>(),
                    padded.seq_lens_kv.mutable_data_ptr<int>(),
                    padded.seq_lens_q.mutable_data_ptr<int>(),
                    narrow(padding.queries)};
  void* argument = &call;
  kernel.launch(padding.batch, 1, kThreads, &argument);
  return padded;
}

}  // namespace cudnn_ops
