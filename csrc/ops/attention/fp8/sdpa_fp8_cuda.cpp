// FP8 attention on CUDA: allocate, make the numbers that a plan reads, make the key, run the plan.
// The host reads neither scales nor lengths.

#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/fp8/sdpa_fp8_cuda.h"
#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/layout.h"
#include "ops/attention/plan_tensors_cuda.h"
#include "ops/or_none_cuda.h"

#include "kernels/fp8.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/arange.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr CallName kCall{
    "cudnn_ops.sdpa_fp8",
    "`python -m cudnn_ops support fp8` shows what cuDNN supports on a GPU; "
    "cudnn_ops.scaled_dot_product_attention on bfloat16 has kernels for the rest"};

at::Tensor empty_numbers(c10::IntArrayRef sizes, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, at::kFloat, like.device(), std::nullopt);
}

at::Tensor lengths_of(const OptionalTensor& lengths) {
  return lengths ? lengths->to(at::kInt).contiguous() : at::Tensor();
}

Fp8Numbers numbers_of(const SdpaFp8& given, const Sdpa& args, at::ScalarType written) {
  // cuDNN knows one descale of the value alone: its output is over those of heads, see in_dtype().
  const at::Tensor of_value = given.has_descales() ? at::Tensor() : at::Tensor(given.descale_value);
  const bool is_widened = written != given.out_dtype && !given.has_descales() && !given.scale_out;
  return make_fp8_numbers({given.descale_query, given.descale_key, of_value, given.scale_out,
                           is_fp8(written), kFp8ScaleOfProbabilities, lengths_of(args.seq_lens_q),
                           lengths_of(args.seq_lens_kv), args.query.size(0), args.query.size(2),
                           args.key.size(2), is_widened});
}

// What a part of a call gives: [B, H, rows, Dv] in the type that cuDNN writes, [B, H, rows].
struct Written {
  at::Tensor out, lse;
  Fp8Numbers numbers;
};

at::Tensor empty_dense(c10::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  return at::detail::empty_strided_cuda(sizes, dense_strides_like(sizes, like), dtype,
                                        like.device());
}

Written run(const SdpaFp8& given, const SdpaFp8Part& part) {
  const Sdpa& args = part.args;
  const auto dtype = written_dtype(given.out_dtype, at::cuda::getCurrentDeviceProperties()->major);
  const at::Tensor query = part.rows == 1 ? two_queries(args.query) : at::Tensor(args.query);
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2),
                                     args.value.size(3)};
  Written written{empty_dense(sizes, query, dtype),
                  given.with_lse ? empty_numbers(query.sizes().slice(0, 3), query) : at::Tensor(),
                  numbers_of(given, args, dtype)};
  SdpaFp8Tensors tensors;
  tensors.query = addressable(query, query);
  tensors.key = addressable(args.key, args.key);
  tensors.value = addressable(args.value, args.value);
  tensors.mask.lengths = written.numbers.lengths;
  tensors.mask.lengths_kv = written.numbers.lengths_kv;
  tensors.scale = Scale(args.scale, query).value;
  tensors.out = written.out;
  tensors.lse = written.lse;
  std::copy_n(written.numbers.numbers.begin(), tensors.numbers.size(), tensors.numbers.begin());
  tensors.amax = {written.numbers.amax, written.numbers.amax_out};
  const auto params =
      sdpa_fp8_params(part, TensorDesc::of(tensors.query), TensorDesc::of(tensors.key),
                      TensorDesc::of(tensors.value), TensorDesc::of(written.out), given.with_lse);
  const SdpaPointers pointers(params, tensors);
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, query.get_device())));
  return written;
}

// Zeros, and minus infinity, where a sequence has no query or no key: cuDNN was told that it has no
// query, and says nothing of those.
void hide_padding(const at::Tensor& lengths, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor position = at::arange(out.size(2), lengths.options());
  const at::Tensor is_hidden = position.ge(lengths.unsqueeze(-1)).unsqueeze(1);  // [B, 1, Sq]
  bytes_of_fp8(out).masked_fill_(is_hidden.unsqueeze(-1), 0);
  if (lse.defined()) lse.masked_fill_(is_hidden, -kInfinity);
}

// The descale of the value for each head of the query.
at::Tensor descales_of_heads(const SdpaFp8& given) {
  const int64_t heads = given.args.query.size(1), of_value = given.args.value.size(1);
  return given.descale_value.reshape({of_value, 1})
      .expand({of_value, heads / of_value})
      .reshape(heads);
}

// Of the queries of a part, in the type that was asked for.
at::Tensor in_dtype(const SdpaFp8& given, const Written& written) {
  const auto dtype = given.out_dtype;
  const auto& [out, lse, numbers] = written;
  if (out.scalar_type() == dtype) {
    // Under descales of the value an output of 8 bits has the same.
    if (given.has_descales() && !is_fp8(dtype)) out.mul_(descales_of_heads(given).view({-1, 1, 1}));
    return out;
  }
  const at::Tensor wide =
      at::detail::empty_strided_cuda(out.sizes(), out.strides(), dtype, out.device());
  if (given.has_descales()) {
    widen_fp8(out, descales_of_heads(given), 1, wide);
  } else {
    const bool is_in_units = !given.scale_out;  // of the value: see Fp8NumbersGiven
    widen_fp8(out, numbers.numbers.back(), std::nullopt, wide,
              is_in_units ? numbers.amax_out : at::Tensor());
  }
  return wide;
}

SdpaFp8Results nothing(const SdpaFp8& given, c10::IntArrayRef sizes) {
  const auto& query = given.args.query;
  const at::Tensor out = empty_dense(sizes, query, given.out_dtype);
  bytes_of_fp8(out).zero_();
  at::Tensor lse;
  if (given.with_lse) lse = empty_numbers(sizes.slice(0, 3), query).fill_(-kInfinity);
  return {out, or_none(lse, query, at::kFloat), empty_numbers({1}, query).zero_(),
          empty_numbers({1}, query).zero_()};
}

SdpaFp8Results sdpa_fp8_cuda(const SdpaFp8& given) {
  check_sdpa_fp8(given);
  const auto& query = given.args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  graph::require_sm80(kCall.op, query.get_device());
  const std::array<int64_t, 4> sizes{query.size(0), query.size(1), query.size(2),
                                     given.args.value.size(3)};
  const SdpaFp8Part part(given.args);
  if (c10::multiply_integers(sizes) == 0 || part.is_empty()) return nothing(given, sizes);
  const Written written = run(given, part);
  const auto& numbers = written.numbers;
  const at::Tensor out = in_dtype(given, written), lse = written.lse;
  if (numbers.lengths.defined()) hide_padding(numbers.lengths, out, lse);
  if (out.size(2) == query.size(2)) {
    return {out, or_none(lse, query, at::kFloat), numbers.amax, numbers.amax_out};
  }
  const auto [all, all_lse, amax, amax_out] = nothing(given, sizes);
  const auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(2, part.row, part.rows); };
  bytes_of_fp8(rows(all)).copy_(bytes_of_fp8(out.narrow(2, 0, part.rows)));
  if (given.with_lse) rows(all_lse).copy_(lse.narrow(2, 0, part.rows));
  return {all, all_lse, numbers.amax, numbers.amax_out};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_sdpa_fp8", cudnn_ops::kernel<cudnn_ops::sdpa_fp8_cuda>);
}
