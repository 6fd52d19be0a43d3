#include "kernels/batch_norm_fold.h"

#include "batch_norm_fold_images.h"
#include "kernels/batch_norm_fold_call.h"
#include "kernels/device_kernel.h"

namespace cudnn_ops {
namespace {

// A row of a weight has dozens to thousands of numbers.
constexpr int kThreads = 128;

const void* address(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

FoldedNorm describe(const BatchNormToFold& norm) {
  const int64_t outputs = norm.weight.size(0), inputs = norm.weight.size(1);
  const int64_t numbers = outputs == 0 ? 0 : norm.weight.numel() / outputs;
  // Rows that lie alike are copied number by number, whatever the numbers are.
  const bool is_alike = norm.weight.strides() == norm.out_weight.strides();
  FoldedNorm found{address(norm.weight),
                   address(norm.bias),
                   address(norm.mean),
                   address(norm.var),
                   address(norm.norm_weight),
                   address(norm.norm_bias),
                   norm.out_weight.mutable_data_ptr(),
                   norm.out_bias.mutable_data_ptr(),
                   static_cast<float>(norm.eps)};
  found.inputs = static_cast<unsigned>(is_alike ? numbers : inputs);
  found.pixels = static_cast<unsigned>(is_alike || inputs == 0 ? 1 : numbers / inputs);
  return found;
}

}  // namespace

void fold_batch_norms(c10::ArrayRef<BatchNormToFold> norms) {
  static const DeviceKernel kernels[3] = {{kBatchNormFoldImages, "batch_norm_fold_half"},
                                          {kBatchNormFoldImages, "batch_norm_fold_bfloat16"},
                                          {kBatchNormFoldImages, "batch_norm_fold_float"}};
  for (size_t begin = 0; begin < norms.size(); begin += kMostFoldedNorms) {
    BatchNormFoldCall call{};
    unsigned blocks = 0;
    const auto some = norms.slice(begin, std::min<size_t>(kMostFoldedNorms, norms.size() - begin));
    for (size_t place = 0; place < some.size(); ++place) {
      call.norms[place] = describe(some[place]);
      blocks += static_cast<unsigned>(some[place].weight.size(0));
      call.norms[place].end = blocks;
    }
    if (blocks == 0) continue;
    void* argument = &call;
    kernels[type_index(some[0].weight.scalar_type())].launch(blocks, 1, kThreads, &argument);
  }
}

}  // namespace cudnn_ops
