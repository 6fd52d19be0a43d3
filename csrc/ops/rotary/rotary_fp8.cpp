// Norm, rotation and rounding to 8 bits of query, key and value: schema and checks. The CUDA
// kernels are called in rotary_fp8_cuda.cpp; those for CPUs and fake tensors are in
// cudnn_ops/ops/rotary_fp8.py.

#include "ops/rotary/rotary_fp8.h"
#include "ops/autograd_node.h"
#include "ops/backward_check.h"

#include <torch/library.h>

namespace cudnn_ops {
namespace {

constexpr const char* kOp = "cudnn_ops.rotary_embedding_qkv_fp8";
// What the kernels have room for.
constexpr int64_t kMostSize = 256, kMostScales = 1024;

bool is_at_most(const c10::SymInt& number, int64_t most) {
  return number.sym_le(most).expect_true(__FILE__, __LINE__);
}

void check_value(const RotaryFp8& args) {
  const auto &query = args.query, &key = args.key, &value = args.value;
  TORCH_CHECK_TYPE(value.defined() && value.scalar_type() == query.scalar_type(), kOp,
                   ": value must be of the query's dtype, ", query.scalar_type(), "; got ",
                   value.defined() ? c10::toString(value.scalar_type()) : "None");
  TORCH_CHECK_VALUE(value.dim() == 4 && value.sym_size(0) == key.sym_size(0) &&
                        value.sym_size(1) == key.sym_size(1) &&
                        value.sym_size(2) == key.sym_size(2) && value.device() == key.device(),
                    kOp, ": value must be [B, heads, S, any size] for a key ", key.sym_sizes(),
                    " on ", key.device(), "; got ", value.sym_sizes(), " on ", value.device());
  TORCH_CHECK_VALUE(
      is_at_most(query.sym_size(3), kMostSize) && is_at_most(value.sym_size(3), kMostSize), kOp,
      ": heads have at most ", kMostSize, " numbers; got ", query.sym_size(3),
      " of query and key, and ", value.sym_size(3), " of value");
}

void check_weight(const RotaryFp8& args, const OptionalTensor& weight, const char* name) {
  if (!weight) return;
  const auto& query = args.query;
  TORCH_CHECK_TYPE(
      weight->scalar_type() == query.scalar_type() || weight->scalar_type() == at::kFloat, kOp,
      ": ", name, " must be of the query's dtype, ", query.scalar_type(), ", or float32; got ",
      weight->scalar_type());
  TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == query.sym_size(3) &&
                        weight->device() == query.device(),
                    kOp, ": ", name, " must be [", query.sym_size(3), "] on ", query.device(),
                    "; got ", weight->sym_sizes(), " on ", weight->device());
}

void check_scales(const RotaryFp8& args) {
  const c10::SymInt count = args.scale_count();
  TORCH_CHECK_VALUE(is_at_most(count, kMostScales), kOp, ": at most ", kMostScales - 2,
                    " heads of the value can have a scale each; it has ", args.value.sym_size(1));
  if (!args.scales) return;
  const auto& scales = *args.scales;
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.device() == args.query.device() &&
                        scales.dim() == 1 &&
                        scales.sym_size(0).sym_eq(count).expect_true(__FILE__, __LINE__),
                    kOp, ": scales must be float32 [", count, "] on ", args.query.device(),
                    ": one of query, one of key, and ",
                    args.per_head ? "one for each head of the value" : "one of value", "; got ",
                    scales.scalar_type(), " ", scales.sym_sizes(), " on ", scales.device());
}

RotaryFp8Results rotary_fp8_autograd(c10::DispatchKeySet keys, const RotaryFp8& args) {
  static const Operator<RotaryFp8Results, RotaryFp8> op("cudnn_ops::_rotary_fp8");
  return without_derivative(op, keys, args, kOp,
                            "cudnn_ops.rotary_embedding_qkv_fp8 has no derivative: rounding to 8 "
                            "bits has none; train with cudnn_ops.rotary_embedding_qk");
}

}  // namespace

void check_rotary_fp8(const RotaryFp8& args) {
  TORCH_CHECK_TYPE(args.query.defined() && args.key.defined(), kOp,
                   ": query and key must be tensors, got None");
  check_rotation({args.query, args.key, args.angles, /*is_backward=*/false}, kOp);
  check_value(args);
  check_weight(args, args.query_weight, "query_weight");
  check_weight(args, args.key_weight, "key_weight");
  TORCH_CHECK_TYPE(!args.query_weight || !args.key_weight ||
                       args.query_weight->scalar_type() == args.key_weight->scalar_type(),
                   kOp, ": query_weight and key_weight must be of one dtype; got ",
                   args.query_weight->scalar_type(), " and ", args.key_weight->scalar_type());
  TORCH_CHECK_VALUE(args.eps >= 0, kOp, ": eps must be at least 0, got ", args.eps);
  TORCH_CHECK_TYPE(is_fp8(args.dtype), kOp, ": dtype must be float8_e4m3fn or float8_e5m2; got ",
                   args.dtype);
  check_scales(args);
}

}  // namespace cudnn_ops

TORCH_LIBRARY_FRAGMENT(cudnn_ops, m) {
  using namespace cudnn_ops;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::string arguments =
      "(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor? positions, "
      "int[] layout, Tensor? scales, Tensor? query_weight, Tensor? key_weight, float eps, "
      "bool zero_centered, bool per_head, ScalarType dtype) -> ";
  m.def(("_rotary_fp8" + arguments +
         "(Tensor query, Tensor key, Tensor value, Tensor descale, Tensor amax)")
            .c_str(),
        tags);
  m.def(("_rotary_fp8_check" + arguments + "()").c_str(), kernel<check_rotary_fp8>, tags);
}

TORCH_LIBRARY_IMPL(cudnn_ops, Autograd, m) {
  m.impl("_rotary_fp8", cudnn_ops::kernel<cudnn_ops::rotary_fp8_autograd>);
}
