// Attention on polymorphic plans: one ragged graph, declared for a rounded-up batch and lengths,
// serves every smaller problem whose tensors have the same head and token strides.
#pragma once

#include "ops/attention/band.h"
#include "ops/attention/attention_params.h"

#include <optional>

namespace cudnn_ops {

// The parameters of the polymorphic plan that serves these, with `band` in place of theirs and with
// each tensor as it lies in memory if ragged offsets can address it (is_token_major), else as a
// dense [B, S, H, D]. None where the declared problem would be more than cuDNN computes rightly, or
// not the same one: a mask has the very sizes, and so have dropout's random numbers.
std::optional<SdpaForwardParams> polymorphic(const SdpaForwardParams& exact, const Band& band);
std::optional<SdpaBackwardParams> polymorphic(const SdpaBackwardParams& exact, const Band& band);

// The same without batch and lengths: what all problems of a family have in common.
SdpaForwardParams family_of(SdpaForwardParams polymorphic);
SdpaBackwardParams family_of(SdpaBackwardParams polymorphic);

// What a plan is declared for that serves this length, this batch and smaller ones.
int64_t declared_length(int64_t length);
int64_t declared_batch(int64_t batch);

// Whether offsets can say where a sequence of this [B, H, S, D] memory begins and nothing else
// depends on its length: the token's stride is the larger one, as in [B, S, H, D].
bool is_token_major(const graph::TensorDesc& tensor);

}  // namespace cudnn_ops
