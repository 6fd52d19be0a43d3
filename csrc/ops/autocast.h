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

// Calls `function` with the arguments, cast to the lower precision, as autocast does those of
// torch's products, where it is enabled for the device of `input`; there it is disabled meanwhile.
template <class Args, class Function>
auto in_lower_precision(const Args& args, const at::Tensor& input, const Function& function) {
  const auto device = input.device().type();
  const bool has_autocast = device == at::kCUDA || device == at::kCPU;
  if (!has_autocast || !at::autocast::is_autocast_enabled(device)) return function(args);
  Args lower = args;
  cast(lower, at::autocast::get_autocast_dtype(device), device);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return function(lower);
}

}  // namespace cudnn_ops
