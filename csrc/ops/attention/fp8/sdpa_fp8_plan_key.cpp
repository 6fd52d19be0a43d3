#include "ops/attention/fp8/sdpa_fp8_plan_key.h"

#include "ops/attention/fp8/sdpa_fp8_problem.h"
#include "ops/attention/layout.h"

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

}  // namespace cudnn_ops
