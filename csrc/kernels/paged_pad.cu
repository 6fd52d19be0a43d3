// The lengths and the page table of a batch as a plan declares them: more rows, wider ones, and
// only pages that a sequence uses. Compiled when the package is built (cmake/compile_kernels.py);
// paged_pad_cuda.cpp launches it.

#include "paged_pad_call.h"

// One block per declared row. cuDNN reads whole tiles of keys, and with them pages behind the last
// one: it finds the sequence's first page there.
extern "C" __global__ void paged_pad(const __grid_constant__ PagedPadCall call) {
  const int row = blockIdx.x;
  const int length =
      row < call.batch ? min(max(call.seq_lens_kv[row] - call.hidden, 0), call.most) : 0;
  const int used = min((length - 1 + call.page_size) / call.page_size, call.width);
  int* to = call.padded_table + (long long)row * call.declared_width;
  const int* from = call.page_table + row * call.row_stride;
  const int filler = used > 0 ? from[0] : 0;
  for (int i = threadIdx.x; i < call.declared_width; i += blockDim.x)
    to[i] = i < used ? from[i] : filler;
  if (threadIdx.x == 0) {
    call.padded_lens[row] = length;
    call.query_lens[row] = row < call.batch ? call.queries : 0;
  }
}
