// Autocast of the public operators, which are made of others: they cast their arguments themselves.
#pragma once

#include "ops/operator.h"

#include <ATen/autocast_mode.h>

namespace cudnn_ops {

// Casts every tensor as autocast of `device` does.
template <class Args>
void cast(Args& args, at::ScalarType dtype, c10::DeviceType device) {
  const auto cast_one = [&](auto& value) {
    value = at::autocast::cached_cast(dtype, std::as_const(value), device);
  };
  std::apply([&](auto&... value) { (cast_one(value), ...); }, Args::fields(args));
}

// Casts the arguments to the lower precision, as autocast does those of torch's products, where it
// is enabled for the device of `input`; it is disabled as long as this lives.
class LowerPrecision {
 public:
  template <class Args>
  LowerPrecision(Args& args, const at::Tensor& input) {
    const auto device = input.device().type();
    const bool has_autocast = device == at::kCUDA || device == at::kCPU;
    if (!has_autocast || !at::autocast::is_autocast_enabled(device)) return;
    cast(args, at::autocast::get_autocast_dtype(device), device);
    no_autocast_.emplace(c10::autocast_dispatch_keyset);
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast_;
};

}  // namespace cudnn_ops
