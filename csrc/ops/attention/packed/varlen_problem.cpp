#include "ops/attention/packed/varlen_problem.h"

#include "ops/attention/band.h"
#include "ops/attention/polymorphic.h"

namespace cudnn_ops {
namespace {

using graph::TensorDesc;

// [tokens, H, D] as a ragged plan declares it. Only the strides of tokens and heads matter.
TensorDesc declare(const at::Tensor& packed, int64_t sequences, int64_t length) {
  const int64_t token = packed.size(0) > 1 ? packed.stride(0) : packed.size(1) * packed.size(2);
  const int64_t head = packed.size(1) > 1 ? packed.stride(1) : packed.size(2);
  TensorDesc desc(packed.scalar_type(), {sequences, packed.size(1), length, packed.size(2)},
                  {0, 0, 0, 1});
  desc.strides = {length * token, head, token, 1};
  return desc;
}

// The same for what a call allocates: the output and the gradients.
TensorDesc declare_dense(const at::Tensor& like, int64_t size, int64_t sequences, int64_t length) {
  const int64_t heads = like.size(1);
  return {like.scalar_type(),
          {sequences, heads, length, size},
          {length * heads * size, size, heads * size, 1}};
}

SdpaMask mask_of(const Varlen& args, bool backward) {
  SdpaMask mask = mask_of_options(args, Band::of(args), args.alibi_slopes.has_value(), backward);
  // At the top left cuDNN's backward skips what is hidden; here that is the bottom right too.
  if (are_same_tokens(args)) mask.bottom_right = false;
  mask.sequences = Sequences::kRagged;
  return mask;
}

}  // namespace

Declared::Declared(const Varlen& args)
    : sequences(declared_batch(args.cu_seqlens_q.size(0) - 1)),
      length(declared_length(args.max_seqlen_q.expect_int())),
      length_kv(declared_length(args.max_seqlen_k.expect_int())) {
}

bool are_same_tokens(const Varlen& args) {
  const auto &q = args.cu_seqlens_q, &k = args.cu_seqlens_k;
  if (args.seqused_q || args.seqused_k) return false;
  if (q.is_meta()) return q.is_same(k);
  return q.const_data_ptr() == k.const_data_ptr() && q.scalar_type() == k.scalar_type() &&
         q.strides() == k.strides();
}

at::Tensor readable(const at::Tensor& packed) {
  return graph::is_addressable(packed) ? packed : packed.contiguous();
}

int64_t lse_stride(const Varlen& args, int64_t sm_major) {
  if (sm_major == 8 || sm_major == 12) return 0;
  int64_t stride = 1024;
  while (stride < args.query.size(0)) stride *= 2;
  return stride;
}

SdpaForwardParams varlen_params(const Varlen& args, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value, bool with_lse, int64_t stride_of_lse) {
  const Declared declared(args);
  return {declare(query, declared.sequences, declared.length),
          declare(key, declared.sequences, declared.length_kv),
          declare(value, declared.sequences, declared.length_kv),
          declare_dense(query, value.size(2), declared.sequences, declared.length),
          mask_of(args, /*backward=*/false),
          with_lse,
          stride_of_lse};
}

SdpaBackwardParams varlen_backward_params(const Varlen& args, const at::Tensor& query,
                                          const at::Tensor& key, const at::Tensor& value,
                                          const at::Tensor& out, const at::Tensor& grad_out,
                                          int64_t stride_of_lse) {
  const Declared declared(args);
  const int64_t sequences = declared.sequences;
  const int64_t length = declared.length, length_kv = declared.length_kv;
  SdpaBackwardParams params{declare(query, sequences, length),
                            declare(key, sequences, length_kv),
                            declare(value, sequences, length_kv),
                            declare(out, sequences, length),
                            declare(grad_out, sequences, length),
                            declare_dense(query, query.size(2), sequences, length),
                            declare_dense(key, key.size(2), sequences, length_kv),
                            declare_dense(value, value.size(2), sequences, length_kv),
                            TensorDesc(),
                            mask_of(args, /*backward=*/true),
                            stride_of_lse};
  params.is_deterministic = is_deterministic(args);
  return params;
}

}  // namespace cudnn_ops
