// Batch norms in evaluation, folded into the convolutions before them, on CUDA.

#include "kernels/batch_norm_fold.h"
#include "ops/batch_norm/fold.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kFold = "cudnn_ops::_fold_batch_norms: ";

at::MemoryFormat format_of(const at::Tensor& weight) {
  return weight.dim() == 4   ? at::MemoryFormat::ChannelsLast
         : weight.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                             : at::MemoryFormat::Contiguous;
}

at::Tensor empty_like(const at::Tensor& given, at::MemoryFormat format) {
  return at::detail::empty_cuda(given.sizes(), given.scalar_type(), given.device(), format);
}

// Of a convolution's outputs; undefined where there is none.
at::Tensor vector(const std::optional<at::Tensor>& given, const at::Tensor& weight) {
  if (!given || !given->defined()) return {};
  TORCH_CHECK_VALUE(
      given->dim() == 1 && given->size(0) == weight.size(0) && given->device() == weight.device(),
      kFold, "what belongs to a weight ", weight.sizes(), " must be [", weight.size(0),
      "], on its device; got ", given->sizes(), " on ", given->device());
  TORCH_CHECK_TYPE(given->scalar_type() == weight.scalar_type(), kFold, "a weight is ",
                   weight.scalar_type(), " and what belongs to it ", given->scalar_type());
  return given->contiguous();
}

std::vector<at::Tensor> fold_cuda(at::TensorList weights, const OptionalTensors& biases,
                                  at::TensorList means, at::TensorList vars,
                                  const OptionalTensors& norm_weights,
                                  const OptionalTensors& norm_biases, at::ArrayRef<double> eps) {
  const size_t count = weights.size();
  for (const size_t given : {biases.size(), means.size(), vars.size(), norm_weights.size(),
                             norm_biases.size(), eps.size()}) {
    TORCH_CHECK_VALUE(given == count, kFold, "every list must have ", count, " items, got ", given);
  }
  std::vector<at::Tensor> results(2 * count);
  const auto dtype = weights[0].scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat, kFold,
                   "weights must be float16, bfloat16 or float32 on a GPU; got ", dtype);
  const c10::cuda::CUDAGuard device_guard(weights[0].device());
  std::vector<BatchNormToFold> norms(count);
  for (size_t place = 0; place < count; ++place) {
    const at::Tensor& given = weights[place];
    TORCH_CHECK_TYPE(given.scalar_type() == dtype && given.device() == weights[0].device(), kFold,
                     "weights must have one dtype and device, got ", dtype, " and ",
                     given.scalar_type(), " on ", weights[0].device(), " and ", given.device());
    TORCH_CHECK_VALUE(given.dim() >= 3, kFold, "weights must have 3 to 5 dimensions, got ",
                      given.sizes());
    const auto format = format_of(given);
    const at::Tensor weight = given.is_contiguous(format) ? given : given.contiguous();
    results[place] = empty_like(weight, format);
    results[count + place] = at::detail::empty_cuda({weight.size(0)}, dtype, weight.device(), {});
    norms[place] = {weight,
                    vector(biases.get(place), weight),
                    vector(means[place], weight),
                    vector(vars[place], weight),
                    vector(norm_weights.get(place), weight),
                    vector(norm_biases.get(place), weight),
                    eps[place],
                    results[place],
                    results[count + place]};
  }
  fold_batch_norms(norms);
  return results;
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_fold_batch_norms", cudnn_ops::fold_cuda);
}
