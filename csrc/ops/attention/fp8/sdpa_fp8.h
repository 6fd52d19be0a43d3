// Scaled dot-product attention over batched tensors of 8 bits: what its files share. See
// cudnn_ops/ops/sdpa_fp8.py for the meaning of the arguments and the formulas.
#pragma once

#include "ops/attention/dense/sdpa.h"
#include "ops/backward_check.h"

namespace cudnn_ops {

// The arguments of a call: some of those that dense attention has, and the scales.
struct SdpaFp8 {
  Sdpa args;
  at::Tensor descale_query, descale_key;  // one float32 on the device
  at::Tensor descale_value;               // likewise, or one for each head
  at::ScalarType out_dtype = at::kBFloat16;
  OptionalTensor scale_out;  // likewise
  bool with_lse = false;

  // Whether each head of the value has a descale.
  bool has_descales() const {
    return args.value.sym_size(1) != 1 && descale_value.sym_numel() != 1;
  }

  template <class Self>
  static auto fields(Self& self) {
    auto& args = self.args;
    return std::tie(args.query, args.key, args.value, self.descale_query, self.descale_key,
                    self.descale_value, self.out_dtype, self.scale_out, args.is_causal, args.scale,
                    args.window_size, args.bottom_right, args.seq_lens_q, args.seq_lens_kv,
                    self.with_lse);
  }
};

// The output, the log-sum-exp (empty without with_lse), and the largest magnitudes of the
// probabilities and of the output.
using SdpaFp8Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

const Operator<SdpaFp8Results, SdpaFp8>& sdpa_fp8_op();

void check_sdpa_fp8(const SdpaFp8& given);

// What attention on 8 bits and attention computed in them check alike.
void check_fp8_operand(const at::Tensor& tensor, const char* name, const at::Tensor& query,
                       const char* op);
void check_fp8_sizes(const Sdpa& args, const char* op);
// What operators on tensors that are rounded already check alike; `quantizer` rounds them.
void check_rounded_operands(const Sdpa& args, const char* quantizer, const char* op);

// What dense and packed attention of 8 bits check alike; `op` begins messages.
void check_fp8_head_size(const at::Tensor& tensor, const char* name, const char* op);
void check_fp8_scale(const at::Tensor& scale, const char* name, const at::Tensor& query,
                     const char* op);
void check_fp8_out_dtype(at::ScalarType dtype, const at::Tensor& query, const char* op);
// The scores'.
void check_fp8_factor(const std::optional<double>& scale, const char* op);

}  // namespace cudnn_ops
