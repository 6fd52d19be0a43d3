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

}  // namespace cudnn_ops
