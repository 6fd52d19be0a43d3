// Rounding to 8 bits and back: what its files share.
#pragma once

#include "ops/quantize_fp8.h"

namespace cudnn_ops {

void check_quantize(const Quantize& args);
void check_dequantize(const Dequantize& args);

}  // namespace cudnn_ops
