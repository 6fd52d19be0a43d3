// Copies each token to the rows of its experts. Compiled when the package is built
// (cmake/compile_kernels.py); moe_rows_cuda.cpp launches it.

#include "moe_rows.cuh"

// A unit of a token, a thread: it is read once.
template <class Unit>
__device__ void scatter(const MoeScatterCall& call) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= call.units) return;
  // A long division takes longer than the rest.
  const long long token = call.units >> 32 ? i / call.of_row : (unsigned)i / call.of_row;
  const unsigned at = i - token * call.of_row;
  const Unit unit = ((const Unit*)call.tokens)[token * call.stride + at];
  const unsigned count = call.positions.of_token;
#pragma unroll 4
  for (unsigned k = 0; k < count; ++k) {
    const RowPlace place = place_of(call.positions, token * count + k);
    Unit* to = (Unit*)call.rows + (long long)place.row * call.of_row + at;
    if (place.has_expert) *to = unit;
    if (place.is_empty) *to = Unit{};
  }
}

#define MOE_SCATTER(bytes, Unit)                                         \
  extern "C" __global__ void __launch_bounds__(256)                      \
      moe_scatter_##bytes(const __grid_constant__ MoeScatterCall call) { \
    scatter<Unit>(call);                                                 \
  }

MOE_SCATTER(16, uint4)
MOE_SCATTER(8, uint2)
MOE_SCATTER(4, unsigned)
MOE_SCATTER(2, unsigned short)
