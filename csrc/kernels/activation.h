// The activations that kernels of ours have, in the order in which schemas count them.
#pragma once

#include "kernels/activation_list.h"

#include <array>
#include <cstdint>
#include <string_view>

namespace cudnn_ops {

#define CUDNN_OPS_ENUMERATOR(name, Name) k##Name,
// kSlope, the last, is for gradients alone: what the forward kept is the slope itself.
enum class Activation : int64_t { CUDNN_OPS_SLOPES(CUDNN_OPS_ENUMERATOR) };
#undef CUDNN_OPS_ENUMERATOR

// Their names, in that order: for users, and with kSlope's for kernels.
#define CUDNN_OPS_NAME(name, Name) std::string_view(#name),
inline constexpr std::array kActivations{CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_NAME)};
inline constexpr std::array kSlopes{CUDNN_OPS_SLOPES(CUDNN_OPS_NAME)};
#undef CUDNN_OPS_NAME

}  // namespace cudnn_ops
