#include "ops/attention/fp8/sdpa_fp8_plan_key.h"

#include "ops/attention/fp8/sdpa_fp8_backward.h"
#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/fp8/sdpa_mxfp8.h"
#include "ops/attention/layout.h"

#include <utility>

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

TensorDesc dense_desc(c10::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  return {dtype, sizes, dense_strides_like(sizes, like)};
}

// What the kernel would hand to cuDNN: the tensor as it lies, or a dense copy of it.
TensorDesc desc_of(const at::Tensor& tensor) {
  return graph::is_addressable(tensor) ? TensorDesc::of(tensor)
                                       : dense_desc(tensor.sizes(), tensor, tensor.scalar_type());
}

}  // namespace

PlanAnswer sdpa_fp8_plan_key(const SdpaFp8PlanRequest& request) {
  const SdpaFp8& given = request.args;
  check_sdpa_fp8(given);
  const SdpaFp8Part part(given.args);
  if (part.is_empty()) {
    return {std::vector<int64_t>(), "cudnn_ops.sdpa_fp8 needs no plan where no key is attended to"};
  }
  const auto &key = part.args.key, &value = part.args.value;
  const at::Tensor query =
      part.rows == 1 ? two_queries(part.args.query) : at::Tensor(part.args.query);
  const auto out = dense_desc({query.size(0), query.size(1), query.size(2), value.size(3)}, query,
                              written_dtype(given.out_dtype, request.sm_major));
  const auto params =
      sdpa_fp8_params(part, desc_of(query), desc_of(key), desc_of(value), out, given.with_lse);
  return {graph::PlanKey::of(params, 0).words().vec(), ""};
}

PlanAnswer sdpa_fp8_backward_plan_key(const SdpaFp8BackwardPlanRequest& request) {
  const SdpaFp8Backward& given = request.args;
  check_sdpa_fp8_backward(given);
  if (auto why = why_no_fp8_backward(request.sm_major); !why.empty()) {
    return {std::vector<int64_t>(), std::move(why)};
  }
  const SdpaFp8Part part(given.args);
  if (part.is_empty()) {
    return {std::vector<int64_t>(),
            "cudnn_ops.sdpa_fp8_backward needs no plan where no key is attended to"};
  }
  const auto rows = [&](const at::Tensor& tensor) {
    const at::Tensor own = tensor.narrow(2, part.row, part.rows);
    return part.rows == 1 ? two_queries(own) : own;
  };
  const auto grad_of = [&](const at::Tensor& like) {
    return dense_desc(like.sizes(), like, given.grad_dtype);
  };
  const at::Tensor query = rows(given.args.query);
  const auto &key = part.args.key, &value = part.args.value;
  SdpaFp8BackwardParams params;
  params.query = desc_of(query);
  params.key = desc_of(key);
  params.value = desc_of(value);
  params.out = desc_of(rows(given.out));
  params.grad_out = desc_of(rows(given.grad_out));
  params.grad_query = grad_of(query);
  params.grad_key = grad_of(key);
  params.grad_value = grad_of(value);
  params.mask = fp8_mask(part, /*backward=*/true);
  return {graph::PlanKey::of(params, 0).words().vec(), ""};
}

PlanAnswer sdpa_mxfp8_plan_key(const SdpaMxFp8& given) {
  check_sdpa_mxfp8(given);
  const auto &query = given.args.query, &key = given.args.key, &value = given.args.value;
  if (query.numel() == 0 || key.size(2) == 0) {
    return {std::vector<int64_t>(), "cudnn_ops.sdpa_mxfp8 needs no plan without queries and keys"};
  }
  if (auto why = why_no_mxfp8(given.args); !why.empty()) {
    return {std::vector<int64_t>(), std::move(why)};
  }
  const auto out = dense_desc({query.size(0), query.size(1), query.size(2), value.size(3)}, query,
                              given.out_dtype);
  const auto params =
      sdpa_mxfp8_params(given.args, desc_of(query), desc_of(key), desc_of(value), out);
  return {graph::PlanKey::of(params, 0).words().vec(), ""};
}

}  // namespace cudnn_ops
