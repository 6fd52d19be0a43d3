// The end of a sum over many rows, of which blocks have each added up some.
#pragma once

// Adds up `rows` rows, the 32 columns of a strip by a block of whole warps, in a fixed order:
// `row_at` says where each row is, and `write` gets each column and its sum.
template <class RowAt, class Write>
__device__ void add_up_rows_at(const RowAt& row_at, unsigned rows, unsigned columns,
                               const Write& write, unsigned strip) {
  __shared__ float by_warp[32][33];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned column = strip * 32 + lane;
  constexpr unsigned kAhead = 8;  // that memory is asked for at once
  float sum = 0;
  for (unsigned first = warp; column < columns && first < rows; first += kAhead * warps) {
    float numbers[kAhead];
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) {
      const unsigned row = first + i * warps;
      numbers[i] = row_at(row < rows ? row : first)[column];
    }
#pragma unroll
    for (unsigned i = 0; i < kAhead; ++i) {
      if (first + i * warps < rows) sum += numbers[i];
    }
  }
  by_warp[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  sum = 0;
  for (unsigned other = 0; other < warps; ++other) sum += by_warp[other][lane];
  write(column, sum);
}

// Of rows that lie one behind the other.
template <class Write>
__device__ void add_up_columns(const float* sums, unsigned rows, unsigned columns,
                               const Write& write, unsigned strip = blockIdx.x) {
  const auto row_at = [&](unsigned row) { return sums + (long long)row * columns; };
  add_up_rows_at(row_at, rows, columns, write, strip);
}
