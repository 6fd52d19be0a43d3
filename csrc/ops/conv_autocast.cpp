// Convolutions under autocast: the rule that torch has for its own, the lower precision.

#include "conv.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

using Numbers = c10::SymIntArrayRef;

template <c10::DeviceType device, class Padding>
struct Autocast {
  using Op = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, Numbers,
                        Padding, Numbers, c10::SymInt, std::string_view, const OptionalTensor&);

  // `name` and overload of the operator that is called with the tensors cast.
  template <const char* const& name>
  static at::Tensor call(const at::Tensor& input, const at::Tensor& weight,
                         const OptionalTensor& bias, Numbers stride, Padding padding,
                         Numbers dilation, c10::SymInt groups, std::string_view activation,
                         const OptionalTensor& residual) {
    constexpr auto key =
        device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const at::Tensor& tensor) {
      return at::autocast::cached_cast(dtype, tensor, device);
    };
    const auto cast_optional = [&](const OptionalTensor& tensor) {
      return tensor ? OptionalTensor(cast(*tensor)) : std::nullopt;
    };
    static const auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow(name, std::is_same_v<Padding, std::string_view> ? "padding" : "")
            .template typed<Op>();
    return op.call(cast(input), cast(weight), cast_optional(bias), stride, padding, dilation,
                   std::move(groups), activation, cast_optional(residual));
  }
};

constexpr const char* kConv1d = "cudnn_ops::conv1d";
constexpr const char* kConv2d = "cudnn_ops::conv2d";
constexpr const char* kConv3d = "cudnn_ops::conv3d";

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  using ByNumbers = Autocast<device, Numbers>;
  using ByName = Autocast<device, std::string_view>;
  m.impl("conv1d", ByNumbers::template call<kConv1d>);
  m.impl("conv2d", ByNumbers::template call<kConv2d>);
  m.impl("conv3d", ByNumbers::template call<kConv3d>);
  m.impl("conv1d.padding", ByName::template call<kConv1d>);
  m.impl("conv2d.padding", ByName::template call<kConv2d>);
  m.impl("conv3d.padding", ByName::template call<kConv3d>);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<at::kCPU>(m);
}
