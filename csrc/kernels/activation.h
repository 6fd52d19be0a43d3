// The activations that kernels of ours have, in the order in which schemas count them.
#pragma once

#include "kernels/activation_list.h"

#include <array>
#include <cstdint>
#include <string_view>

namespace cudnn_ops {

#define CUDNN_OPS_ENUMERATOR(name, Name) k##Name,
enum class Activation : int64_t { CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_ENUMERATOR) };
#undef CUDNN_OPS_ENUMERATOR

// Their names for users, in that order.
#define CUDNN_OPS_NAME(name, Name) std::string_view(#name),
inline constexpr std::array kActivations{CUDNN_OPS_ACTIVATIONS(CUDNN_OPS_NAME)};
#undef CUDNN_OPS_NAME

}  // namespace cudnn_ops
