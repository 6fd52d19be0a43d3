// Layer norm under autocast on CUDA: the rule that torch has for its own, float32. RMS norm has
// none there, and on a CPU neither has.

#include "ops/norm/norm.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

at::Tensor layer_norm_autocast(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               bool zero_centered) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCUDA);
  const auto cast = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::kFloat, tensor, at::kCUDA);
  };
  const auto cast_parameter = [&](const OptionalTensor& tensor) {
    return tensor ? OptionalTensor(cast(*tensor)) : std::nullopt;
  };
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("cudnn_ops::layer_norm", "")
          .typed<at::Tensor(const at::Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                            const OptionalTensor&, double, bool)>();
  return op.call(cast(input), normalized_shape, cast_parameter(weight), cast_parameter(bias), eps,
                 zero_centered);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  m.impl("layer_norm", cudnn_ops::layer_norm_autocast);
}
