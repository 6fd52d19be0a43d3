// What the rows of a block are modulated by, on its way to shared memory while they are on theirs.
//
// Blocks that follow one another on a multiprocessor are of many samples, so that its first cache
// has hardly ever what the next one needs: read behind a row's moments, it would be waited for once
// more. A block's rows, one a warp or a part of one, read it from there but for those of another
// sample than the first one's.
#pragma once

#include "adaptive_norm.cuh"
#include "async_copy.cuh"

// Of scale and shift of the rows' own type; a gate of another one is read where it is.
class Ahead {
 public:
  __device__ explicit Ahead(const AdaptiveNormCall& call)
      : call_(call), sample_(blockIdx.x * (blockDim.x / call.group) / call.tokens) {
    copy(kScale, factor_of(call, sample_).data);
    copy(kShift, shift_of(call, sample_).data);
    if (has_gate()) copy(kGate, gate_of(call, sample_).data);
  }

  // The update's piece `v` of a thread.
  __device__ void copy_update(int v, const void* from) const {
    copy_async<16>(update(v), from);
  }
  // Where that is, after wait().
  __device__ unsigned char* update(int v) const {
    return at(kUpdate) + 16 * (v * blockDim.x + threadIdx.x);
  }
  // For all that is on its way. Every thread must come here.
  __device__ void wait() const {
    wait_for_copies();
    __syncthreads();
  }

  // Where those of a sample are read.
  __device__ const void* scale(unsigned sample) const {
    return sample == sample_ ? at(kScale) : factor_of(call_, sample).data;
  }
  __device__ const void* shift(unsigned sample) const {
    return sample == sample_ ? at(kShift) : shift_of(call_, sample).data;
  }
  __device__ Parameter gate(unsigned sample) const {
    Parameter gate = gate_of(call_, sample);
    if (has_gate() && sample == sample_) gate.data = at(kGate);
    return gate;
  }

 private:
  enum Part : unsigned { kScale, kShift, kGate, kUpdate };

  __device__ bool has_gate() const {
    return call_.gate.data != nullptr && call_.is_gate_float == call_.is_scale_float;
  }
  __device__ unsigned char* at(Part part) const {
    extern __shared__ uint4 memory[];
    return (unsigned char*)memory + part * call_.row_bytes;
  }
  __device__ void copy(Part part, const void* from) const {
    for (unsigned byte = 16 * threadIdx.x; byte < call_.row_bytes; byte += 16 * blockDim.x) {
      copy_async<16>(at(part) + byte, (const unsigned char*)from + byte);
    }
  }

  const AdaptiveNormCall& call_;
  const unsigned sample_;  // of the block's first row
};
