// The lengths and the page table of a batch as a plan takes them: more rows, wider ones, and no
// pages but those that a sequence uses. Compiled when the package is built
// (cmake/compile_kernels.py); paged_pad_cuda.cpp launches it.

// A block a declared row. cuDNN reads a whole tile of keys, pages behind the last one among them:
// it finds the sequence's first one there. `hidden`: how many keys at the end are kept from it;
// `most`: how many of the others it is shown at most.
extern "C" __global__ void paged_pad(const int* page_table, long long row_stride,
                                     const int* seq_lens_kv, int batch, int width, int page_size,
                                     int hidden, int most, int declared_width,
                                     int* padded_table, int* padded_lens, int queries,
                                     int* query_lens) {
  const int row = blockIdx.x;
  const int length = row < batch ? min(max(seq_lens_kv[row] - hidden, 0), most) : 0;
  const int used = min((length - 1 + page_size) / page_size, width);
  int* to = padded_table + (long long)row * declared_width;
  const int* from = page_table + row * row_stride;
  const int filler = used > 0 ? from[0] : 0;
  for (int i = threadIdx.x; i < declared_width; i += blockDim.x)
    to[i] = i < used ? from[i] : filler;
  if (threadIdx.x == 0) {
    padded_lens[row] = length;
    query_lens[row] = row < batch ? queries : 0;
  }
}
