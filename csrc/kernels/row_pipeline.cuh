// Rows on their way through shared memory while those before them are worked on.
#pragma once

#include "async_copy.cuh"
#include "norm_rows.cuh"

// All 16 bytes at a time that a row lies in, by the threads that share it; from its end up to
// `room` bytes, a multiple of 16, there are zeros.
__device__ void copy_whole(unsigned char* to, const void* row, unsigned bytes, unsigned room,
                           unsigned thread, unsigned group) {
  const unsigned before = (unsigned long long)row % 16, end = before + bytes;
  const unsigned char* from = (const unsigned char*)row - before;
  for (unsigned at = 16 * thread; at < room; at += 16 * group) {
    copy_async<16>(to + at, from + at, at < end ? min(end - at, 16u) : 0);
  }
}

// Rows to come of each of kTensors, on their way through shared memory. A thread copies the pieces
// that it needs, so that nobody waits for another. cp.async takes 4 bytes or more: where pieces are
// smaller the threads of a row copy all 16 bytes at a time that it lies in, and wait for each
// other.
template <int kBytes, int kVectors, int kStages, unsigned kTensors = 2>
struct Pipeline {
  using Vector = Piece<Type, kBytes / sizeof(Bits)>;
  static constexpr bool kIsWhole = kBytes < 4;

  unsigned group, row_bytes;  // NormCall's

  __device__ void load(unsigned stage, unsigned tensor, const Bits* row, unsigned vectors) const {
    const unsigned thread = threadIdx.x % group;
    if constexpr (kIsWhole) {
      copy_whole(whole(stage, tensor), row, vectors * kBytes, row_bytes, thread, group);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const unsigned at = thread + v * group;
        if (at < vectors)
          copy_async<kBytes>(slot(stage, tensor, v), (const Vector*)row + at, kBytes);
      }
    }
  }
  // The thread's pieces of a row.
  struct Pieces {
    const Vector* first;
    unsigned step;
    __device__ const Vector& operator[](int v) const {
      return first[v * step];
    }
  };
  // Those of `row`, once it has arrived.
  __device__ Pieces pieces(unsigned stage, unsigned tensor, const Bits* row) const {
    if constexpr (kIsWhole) {
      const unsigned char* first = whole(stage, tensor) + (unsigned long long)row % 16;
      return {(const Vector*)first + threadIdx.x % group, group};
    } else {
      return {(const Vector*)slot(stage, tensor, 0), blockDim.x};
    }
  }
  static __device__ void commit() {
    commit_copies();
  }
  // For all but the `kPending` last that were committed.
  template <int kPending = kStages - 1>
  __device__ void wait() const {
    wait_for_all_but<kPending>();
    if constexpr (kIsWhole) {
      if (group > 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  // The memory of all rows.
  __device__ void* begin() const {
    return shared();
  }
  // And that behind them, at a multiple of 16 bytes.
  __device__ void* behind() const {
    return kIsWhole ? shared() + kStages * kTensors * (blockDim.x / group) * row_bytes
                    : shared() + kStages * kTensors * kVectors * blockDim.x * kBytes;
  }

 private:
  static __device__ unsigned char* shared() {
    extern __shared__ uint4 memory[];
    return (unsigned char*)memory;
  }
  __device__ unsigned char* slot(unsigned stage, unsigned tensor, int v) const {
    return shared() +
           (((stage * kTensors + tensor) * kVectors + v) * blockDim.x + threadIdx.x) * kBytes;
  }
  __device__ unsigned char* whole(unsigned stage, unsigned tensor) const {
    const unsigned groups = blockDim.x / group;
    return shared() + ((stage * kTensors + tensor) * groups + threadIdx.x / group) * row_bytes;
  }
};
