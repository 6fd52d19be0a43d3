// Convolutions under autocast: the rule that torch has for its own, the lower precision.

#include "ops/attention/dense/sdpa.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

template <c10::DeviceType device, class... Args>
struct Autocast {
  // `name` and `overload` of the operator that is called with the tensors cast.
  template <const char* const& name, const char* const& overload>
  static at::Tensor call(Args... args) {
    constexpr auto key =
        device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(name, overload)
                               .template typed<at::Tensor(Args...)>();
    const auto dtype = at::autocast::get_autocast_dtype(device);
    return op.call(at::autocast::cached_cast(dtype, args, device)...);
  }
};

constexpr const char *kByNumbers = "", *kByName = "padding";
constexpr const char *kConv1d = "cudnn_ops::conv1d", *kPacked1d = "cudnn_ops::_conv1d";
constexpr const char *kConv2d = "cudnn_ops::conv2d", *kPacked2d = "cudnn_ops::_conv2d";
constexpr const char *kConv3d = "cudnn_ops::conv3d", *kPacked3d = "cudnn_ops::_conv3d";

template <c10::DeviceType device, const char* const& name, const char* const& packed>
void register_dims(torch::Library& m) {
  using Numbers = c10::IntArrayRef;
  using Name = std::string_view;
  using Tensor = const at::Tensor&;
  using Optional = const OptionalTensor&;
  using ByNumbers = Autocast<device, Tensor, Tensor, Optional, Numbers, Numbers, Numbers, int64_t,
                             Name, Optional>;
  using ByName =
      Autocast<device, Tensor, Tensor, Optional, Numbers, Name, Numbers, int64_t, Name, Optional>;
  using Packed = Autocast<device, Tensor, Tensor, Optional, Numbers, Name, Optional>;
  const std::string full = name;
  m.impl(name, ByNumbers::template call<name, kByNumbers>);
  m.impl((full + ".padding").c_str(), ByName::template call<name, kByName>);
  m.impl(packed, Packed::template call<packed, kByNumbers>);
}

template <c10::DeviceType device>
void register_all(torch::Library& m) {
  register_dims<device, kConv1d, kPacked1d>(m);
  register_dims<device, kConv2d, kPacked2d>(m);
  register_dims<device, kConv3d, kPacked3d>(m);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_all<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_all<at::kCPU>(m);
}
