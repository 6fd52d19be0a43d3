// Autocast of an operator: the same call below autocast, with its tensors in another dtype.
#pragma once

#include "ops/operator.h"

#include <ATen/autocast_mode.h>

namespace cudnn_ops {

template <c10::DeviceType device, class Result, class Args>
Result call_in_dtype(const Operator<Result, Args>& op, const Args& args, at::ScalarType dtype) {
  constexpr auto key =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  Args cast;
  Args::fields(cast) = std::apply(
      [&](const auto&... value) {
        return std::make_tuple(at::autocast::cached_cast(dtype, value, device)...);
      },
      Args::fields(args));
  return op.call(cast);
}

}  // namespace cudnn_ops
