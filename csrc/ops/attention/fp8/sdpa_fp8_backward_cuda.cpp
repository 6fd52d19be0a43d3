// The gradients of FP8 attention on CUDA: allocate, make the numbers that the plan reads, make the
// key, run the plan. The host reads neither scales nor lengths.

#include "ops/attention/fp8/sdpa_fp8_backward.h"
#include "ops/attention/dense/sdpa_problem.h"
#include "ops/attention/fp8/sdpa_fp8_cuda.h"
#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/layout.h"
#include "ops/attention/plan_tensors_cuda.h"

#include "kernels/fp8.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr CallName kCall{
    "cudnn_ops.sdpa_fp8_backward",
    "`python -m cudnn_ops explain sdpa_fp8_backward` shows what cuDNN supports on a GPU; "
    "cudnn_ops.scaled_dot_product_attention_fp8 has gradients in 16 bits for the rest"};

struct Gradients {
  at::Tensor query, key, value;

  Gradients(const Sdpa& args, const at::Tensor& query_, at::ScalarType dtype)
      : query(empty(query_, dtype)), key(empty(args.key, dtype)), value(empty(args.value, dtype)) {
  }
  void zero() const {
    for (const auto* tensor : {&query, &key, &value}) tensor->zero_();
  }

 private:
  static at::Tensor empty(const at::Tensor& like, at::ScalarType dtype) {
    const auto sizes = like.sizes();
    return at::detail::empty_strided_cuda(sizes, dense_strides_like(sizes, like), dtype,
                                          like.device());
  }
};

// What the plan reads and writes beside tensors, in two calls of the kernel that makes them.
struct Numbers {
  Fp8Numbers of_inputs, of_grads;

  Numbers(const SdpaFp8Backward& given, const Sdpa& args) {
    const auto lengths_of = [](const OptionalTensor& lengths) {
      return lengths ? lengths->to(at::kInt).contiguous() : at::Tensor();
    };
    of_inputs = make_fp8_numbers(
        {given.descale_query, given.descale_key, given.descale_value, given.scale_grad_scores,
         /*is_scaled=*/true, kFp8ScaleOfProbabilities, lengths_of(args.seq_lens_q),
         lengths_of(args.seq_lens_kv), args.query.size(0), args.query.size(2), args.key.size(2)});
    of_grads =
        make_fp8_numbers({given.descale_out, given.descale_grad_out, at::Tensor(), std::nullopt,
                          /*is_scaled=*/false, 1, at::Tensor(), at::Tensor(), 0, 0, 0});
  }
  const at::Tensor& amax() const {
    return of_inputs.amax;
  }
  void add_to(SdpaPointers& pointers) const {
    const auto &inputs = of_inputs.numbers, &grads = of_grads.numbers;
    const at::Tensor& one = grads[2];  // gradients of 16 bits are not scaled
    for (const auto* number :
         {&inputs[0], &inputs[1], &inputs[2], &inputs[3], &inputs[4], &grads[0], &grads[1],
          /*descale_dp=*/&inputs[6], /*scale_dp=*/&inputs[5], &one, &one, &one}) {
      pointers.all.push_back(number->mutable_data_ptr());
    }
    for (const auto* number :
         {&of_inputs.amax, &of_inputs.amax_out, &of_grads.amax, &of_grads.amax_out}) {
      pointers.written.push_back({pointers.all.size(), number->nbytes()});
      pointers.all.push_back(number->mutable_data_ptr());
    }
  }
};

// A probability is exp(score - lse): queries that see nothing must have none, and not infinity.
at::Tensor lse_of(const at::Tensor& given, const SdpaFp8Part& part) {
  at::Tensor lse = given.narrow(2, part.row, part.rows);
  if (is_padded(part.args)) lse = lse.masked_fill(lse.eq(-kInfinity), kInfinity);
  if (part.rows == 1) lse = at::constant_pad_nd(lse, {0, 1}, kInfinity);
  return lse.contiguous();
}

struct Computed {
  Gradients grads;
  at::Tensor amax;
};

Computed run(const SdpaFp8Backward& given, const SdpaFp8Part& part) {
  const Sdpa& args = part.args;
  const auto rows = [&](const at::Tensor& tensor) {
    const at::Tensor own = tensor.narrow(2, part.row, part.rows);
    return part.rows == 1 ? two_queries(own) : own;
  };
  const auto usable = [](const at::Tensor& tensor) {
    return addressable(tensor, tensor, kMaxBackwardElements);
  };
  const at::Tensor query = rows(given.args.query);
  const Gradients grads(args, query, given.grad_dtype);
  const Numbers numbers(given, args);
  SdpaBackwardTensors tensors{};
  tensors.query = usable(query);
  tensors.key = usable(args.key);
  tensors.value = usable(args.value);
  tensors.out = usable(rows(given.out));
  tensors.lse = lse_of(given.lse, part);
  tensors.grad_out = usable(rows(given.grad_out));
  tensors.mask.lengths = numbers.of_inputs.lengths;
  tensors.mask.lengths_kv = numbers.of_inputs.lengths_kv;
  tensors.scale = Scale(args.scale, query).value;
  tensors.grad_query = grads.query;
  tensors.grad_key = grads.key;
  tensors.grad_value = grads.value;
  SdpaFp8BackwardParams params;
  params.query = TensorDesc::of(tensors.query);
  params.key = TensorDesc::of(tensors.key);
  params.value = TensorDesc::of(tensors.value);
  params.out = TensorDesc::of(tensors.out);
  params.grad_out = TensorDesc::of(tensors.grad_out);
  params.grad_query = TensorDesc::of(grads.query);
  params.grad_key = TensorDesc::of(grads.key);
  params.grad_value = TensorDesc::of(grads.value);
  params.mask = fp8_mask(part, /*backward=*/true);
  if (is_padded(args)) grads.zero();  // cuDNN leaves alone what is beyond the lengths
  SdpaPointers pointers(params, tensors);
  numbers.add_to(pointers);
  const graph::Call call = call_of(kCall, pointers);
  graph::execute(call, *graph::get_plan(call, graph::PlanKey::of(params, query.get_device())));
  return {grads, numbers.amax()};
}

void refuse_large(const SdpaFp8Backward& given) {
  const Sdpa& args = given.args;
  const int64_t largest =
      std::max({args.query.numel(), args.key.numel(), args.value.numel(), given.out.numel()});
  TORCH_CHECK_NOT_IMPLEMENTED(
      std::max(args.query.size(0), args.query.size(1)) <= kMaxBackwardRows &&
          largest <= kMaxBackwardElements,
      kCall.op, ": more than 2^31 elements, ", kMaxBackwardRows,
      " batch entries or heads are more than cuDNN supports; got ", args.query.sizes(), " and ",
      args.key.sizes());
}

SdpaFp8Gradients sdpa_fp8_backward_cuda(const SdpaFp8Backward& given) {
  check_sdpa_fp8_backward(given);
  const auto &query = given.args.query, &key = given.args.key;
  const c10::cuda::CUDAGuard device_guard(query.device());
  const std::string why = why_no_fp8_backward(at::cuda::getCurrentDeviceProperties()->major);
  TORCH_CHECK_NOT_IMPLEMENTED(why.empty(), why);
  const SdpaFp8Part part(given.args);
  const bool is_empty = given.out.numel() == 0 || part.is_empty();
  if (!is_empty) {
    refuse_large(given);
    const auto [grads, amax] = run(given, part);
    if (part.rows == query.size(2) && part.rows > 1 && part.columns == key.size(2)) {
      return {grads.query, grads.key, grads.value, amax};
    }
    const Gradients all(given.args, query, given.grad_dtype);
    all.zero();
    all.query.narrow(2, part.row, part.rows).copy_(grads.query.narrow(2, 0, part.rows));
    all.key.narrow(2, part.column, part.columns).copy_(grads.key);
    all.value.narrow(2, part.column, part.columns).copy_(grads.value);
    return {all.query, all.key, all.value, amax};
  }
  const Gradients none(given.args, query, given.grad_dtype);
  none.zero();
  const at::Tensor amax = at::detail::empty_cuda({1}, at::kFloat, query.device(), std::nullopt);
  return {none.query, none.key, none.value, amax.zero_()};
}

}  // namespace
}  // namespace cudnn_ops

TORCH_LIBRARY_IMPL(cudnn_ops, CUDA, m) {
  m.impl("_sdpa_fp8_backward", cudnn_ops::kernel<cudnn_ops::sdpa_fp8_backward_cuda>);
}
