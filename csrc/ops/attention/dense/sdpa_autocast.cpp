// Scaled dot-product attention under autocast: the rule that torch has for its own. What is float32
// becomes the lower precision, but for the masks, which cuDNN takes as they are.

#include "ops/attention/dense/sdpa_call.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace cudnn_ops {
namespace {

template <c10::DeviceType device, class Result,
          const c10::TypedOperatorHandle<AttentionOp<Result>>& (*op)()>
Result autocast(const Attention& args) {
  constexpr auto key_of_device =
      device == at::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key_of_device);
  const auto cast = [dtype = at::autocast::get_autocast_dtype(device)](const at::Tensor& tensor) {
    return at::autocast::cached_cast(dtype, tensor, device);
  };
  const at::Tensor query = cast(args.query), key = cast(args.key), value = cast(args.value);
  return call(
      op(), {query, key, value, args.attn_mask, args.dropout_p, args.is_causal, args.scale,
             args.enable_gqa, args.window_size, args.bottom_right, args.softcap, args.alibi_slopes,
             args.sinks, args.seq_lens_q, args.seq_lens_kv, args.deterministic, args.rng_state});
}

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", attention_kernel<at::Tensor, autocast<device, at::Tensor, sdpa_op>>);
  m.impl("sdpa_with_lse",
         attention_kernel<OutAndLse, autocast<device, OutAndLse, sdpa_with_lse_op>>);
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCUDA, m) {
  cudnn_ops::register_autocast<at::kCUDA>(m);
}

TORCH_LIBRARY_IMPL(cudnn_ops, AutocastCPU, m) {
  cudnn_ops::register_autocast<at::kCPU>(m);
}
