// Attention over packed sequences of 8 bits on CUDA: a ragged plan, as that of 16 bits
// (packed/varlen_cuda.cpp), and the numbers of FP8 attention. The host reads neither.

#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/fp8/sdpa_fp8_cuda.h"
#include "ops/attention/fp8/varlen_fp8_problem.h"
#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/packed/varlen_part.h"
#include "ops/attention/packed/varlen_problem.h"
#include "ops/attention/packed/varlen_table.h"
#include "ops/attention/plan_tensors_cuda.h"

#include "kernels/fp8.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/maximum.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace cudnn_ops {
namespace {

constexpr CallName kCall{
    "cudnn_ops.varlen_attention_fp8",
    "`python -m cudnn_ops explain varlen_attention_fp8` shows what cuDNN supports on a GPU; "
    "cudnn_ops.varlen_attention on bfloat16 has kernels for the rest"};

at::Tensor empty(c10::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::detail::empty_cuda(sizes, dtype, like.device(), std::nullopt);
}

// Writes the output of some sequences, and returns the numbers that the plan read and wrote.
Fp8Numbers run(const VarlenFp8& given, const Varlen& args, const at::Tensor& out) {
  SdpaFp8Tensors tensors;
  tensors.query = readable(args.query);
  tensors.key = readable(args.key);
  tensors.value = readable(args.value);
  tensors.scale = Scale(args.scale, args.query).value;
  tensors.out = out;
  const Fp8Numbers numbers = make_fp8_numbers(
      {given.descale_query, given.descale_key, given.descale_value, given.scale_out,
       is_fp8(out.scalar_type()), kFp8ScaleOfProbabilities, at::Tensor(), at::Tensor(), 0, 0, 0});
  std::copy_n(numbers.numbers.begin(), tensors.numbers.size(), tensors.numbers.begin());
  tensors.amax = {numbers.amax, numbers.amax_out};
  const auto params =
      varlen_fp8_params(args, tensors.query, tensors.key, tensors.value, out.scalar_type());
  SdpaPointers pointers(params, tensors);
  VarlenTable table(args, Declared(args).sequences);
  table.require_keys(args.key.size(0));
  table.add_offsets(tensors.query, false);
  table.add_offsets(tensors.key, true);
  table.add_offsets(tensors.value, true);
  table.add_offsets(out, false);
  table.make(pointers.all);
  pointers.add_numbers(tensors);
  pointers.written.clear();  // one plan for many lengths: its engine is not measured at one of them
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, args.query.get_device())));
  return numbers;
}

VarlenFp8Results varlen_fp8_cuda(const VarlenFp8& given) {
  check_varlen_fp8(given);
  const Varlen& args = given.args;
  const auto& query = args.query;
  const c10::cuda::CUDAGuard device_guard(query.device());
  graph::require_sm80(kCall.op, query.get_device());
  const auto dtype = written_dtype(given.out_dtype, at::cuda::getCurrentDeviceProperties()->major);
  const at::Tensor out = empty({query.size(0), query.size(1), args.value.size(2)}, dtype, query);
  at::Tensor amax, amax_out, descale;
  const bool is_empty = out.numel() == 0 || args.key.size(0) == 0 || args.cu_seqlens_q.size(0) == 1;
  if (is_empty || !are_same_tokens(args)) bytes_of_fp8(out).zero_();
  if (is_empty) {
    amax = empty({1}, at::kFloat, query).zero_();
    amax_out = empty({1}, at::kFloat, query).zero_();
  } else {
    for_sequences(args, kMaxBackwardRows, [&](const Varlen& part, int64_t start) {
      const Fp8Numbers numbers = run(given, part, out);
      amax = start == 0 ? numbers.amax : at::maximum(amax, numbers.amax);
      amax_out = start == 0 ? numbers.amax_out : at::maximum(amax_out, numbers.amax_out);
      descale = numbers.numbers.back();
    });
  }
  if (dtype == given.out_dtype) return {out, amax, amax_out};
  const at::Tensor wide = empty(out.sizes(), given.out_dtype, query);
  if (is_empty) {
    wide.zero_();
  } else {
    widen_fp8(out, descale, std::nullopt, wide);
  }
  return {wide, amax, amax_out};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_varlen_fp8", cudnn_ops::kernel<cudnn_ops::varlen_fp8_cuda>);
}
