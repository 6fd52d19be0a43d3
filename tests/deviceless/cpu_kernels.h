// CUDA C++ for a CPU, as far as kernels of ours need it: the threads of a block run in turns, each
// up to where it waits for others. cpu_kernels.py compiles kernels with it.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

using std::max;
using std::min;

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct Index {
  unsigned x, y, z;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}
inline unsigned __float_as_uint(float value) {
  return bits_as<unsigned>(value);
}
inline float __uint_as_float(unsigned bits) {
  return bits_as<float>(bits);
}
inline int __clz(unsigned value) {
  return std::countl_zero(value);
}
inline float rsqrtf(float value) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(value)));
}
inline void max_NaN_f32(float& most, float one, float other) {
  most = std::isnan(one) || std::isnan(other) ? __uint_as_float(0x7fffffff) : std::max(one, other);
}
inline void min_NaN_f32(float& least, float one, float other) {
  least = std::isnan(one) || std::isnan(other) ? __uint_as_float(0x7fffffff) : std::min(one, other);
}
inline float __expf(float value) {
  return std::exp(value);
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __frcp_rn(float value) {
  return 1 / value;
}
inline unsigned atomicMax(unsigned* address, unsigned value) {
  const unsigned old = *address;
  *address = std::max(old, value);
  return old;
}

// What number.cuh and activation.cuh have instructions for.
inline void rcp_approx_ftz_f32(float& near, float x) {
  near = 1 / x;
}
inline void ex2_approx_ftz_f32(float& near, float x) {
  near = std::exp2(x);
}
inline void cvt_f32_f16(float& value, unsigned short bits) {
  value = static_cast<float>(bits_as<_Float16>(bits));
}
inline void cvt_rn_f16_f32(unsigned short& bits, float value) {
  bits = bits_as<unsigned short>(static_cast<_Float16>(value));
}
inline void cvt_rn_bf16_f32(unsigned short& bits, float value) {
  const unsigned whole = __float_as_uint(value);
  bits = std::isnan(value) ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
}
inline void cvt_rn_f16x2_f32(unsigned& bits, float high, float low) {
  unsigned short halves[2];
  cvt_rn_f16_f32(halves[0], low);
  cvt_rn_f16_f32(halves[1], high);
  std::memcpy(&bits, halves, sizeof(bits));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  const unsigned char* bytes[2] = {reinterpret_cast<unsigned char*>(&x),
                                   reinterpret_cast<unsigned char*>(&y)};
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = selectors >> (4 * i) & 7;
    result |= static_cast<unsigned>(bytes[from / 4][from % 4]) << (8 * i);
  }
  return result;
}
inline void mul_rn_f16x2(unsigned& product, unsigned x, unsigned y) {
  _Float16 one[2], other[2];
  std::memcpy(one, &x, sizeof(x));
  std::memcpy(other, &y, sizeof(y));
  for (int i = 0; i < 2; ++i) one[i] *= other[i];
  std::memcpy(&product, one, sizeof(x));
}
inline void cvt_rn_bf16x2_f32(unsigned& bits, float high, float low) {
  unsigned short halves[2];
  cvt_rn_bf16_f32(halves[0], low);
  cvt_rn_bf16_f32(halves[1], high);
  std::memcpy(&bits, halves, sizeof(bits));
}

// Where so many threads wait for each other.
struct Meeting {
  unsigned arrived = 0, round = 0;
};

// A thread of a block. Its stack is made once; from then on jumps switch to and from it, which, as
// switches of contexts do not, leave the kernel of the operating system alone.
struct Fiber {
  static constexpr size_t kStack = 256 << 10;
  std::unique_ptr<char[]> stack;
  ucontext_t context;
  jmp_buf begin, waiting;
  jmp_buf* next;
  const Meeting* meeting;  // that it waits in for the end of a round, if any
  unsigned round;
  bool is_done;

  bool can_run() const {
    return !is_done && (meeting == nullptr || meeting->round != round);
  }
};

struct Block {
  static constexpr unsigned kMostThreads = 1024;
  jmp_buf scheduler;
  std::vector<Fiber> fibers = std::vector<Fiber>(kMostThreads);
  Meeting whole, warps[kMostThreads / 32], groups[kMostThreads / 32];
  unsigned values[kMostThreads];
  void (*kernel)(const void*);
  const void* argument;
  bool has_moved;

  void resume(Fiber& fiber);
  void meet(Meeting& meeting, unsigned all) {
    has_moved = true;
    if (++meeting.arrived == all) {
      meeting.arrived = 0;
      ++meeting.round;
      return;
    }
    Fiber& mine = fibers[threadIdx.x];
    mine.meeting = &meeting;
    mine.round = meeting.round;
    mine.next = &mine.waiting;
    if (_setjmp(mine.waiting) == 0) _longjmp(scheduler, 1);
  }
  void meet_warp() {
    meet(warps[threadIdx.x / 32], 32);
  }
};
inline Block the_block;

inline void __syncthreads() {
  the_block.meet(the_block.whole, blockDim.x);
}

inline int __syncthreads_or(int is_so) {
  static int is_any;
  __syncthreads();
  is_any = 0;
  __syncthreads();
  is_any |= is_so;
  __syncthreads();
  return is_any;
}

inline void __syncwarp() {
  the_block.meet_warp();
}

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned distance) {
  the_block.values[threadIdx.x] = bits_as<unsigned>(value);
  the_block.meet_warp();
  const T other = bits_as<T>(the_block.values[threadIdx.x ^ distance]);
  the_block.meet_warp();
  return other;
}

template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  the_block.values[threadIdx.x] = bits_as<unsigned>(value);
  the_block.meet_warp();
  const T other = bits_as<T>(the_block.values[threadIdx.x / 32 * 32 + lane]);
  the_block.meet_warp();
  return other;
}

// See cpu_grid_barrier.h and cpu_cluster.h.
struct Grid {
  unsigned cluster;  // blocks
  bool has_barrier, passes_barrier;
};
inline Grid the_grid;

inline void end_thread() {
  the_block.fibers[threadIdx.x].is_done = the_block.has_moved = true;
  _longjmp(the_block.scheduler, 1);
}

// The bottom of each stack, to which a thread of the next block goes back.
inline void start_thread() {
  _setjmp(the_block.fibers[threadIdx.x].begin);
  the_block.kernel(the_block.argument);
  end_thread();
}

inline void Block::resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.stack != nullptr) _longjmp(*fiber.next, 1);
  fiber.stack.reset(new char[Fiber::kStack]);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = Fiber::kStack;
  makecontext(&fiber.context, start_thread, 0);
  setcontext(&fiber.context);
}

inline void run_block(unsigned threads) {
  Block& block = the_block;
  block.whole = {};
  for (auto& warp : block.warps) warp = {};
  for (auto& group : block.groups) group = {};
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.is_done = false;
    fiber.meeting = nullptr;
    fiber.next = &fiber.begin;
  }
  do {
    block.has_moved = false;
    // Backwards, as GPUs might.
    for (unsigned i = threads; i-- > 0;) {
      if (!block.fibers[i].can_run()) continue;
      threadIdx = {i, 0, 0};
      block.resume(block.fibers[i]);
    }
  } while (block.has_moved);
  for (unsigned i = 0; i < threads; ++i) {
    if (block.fibers[i].is_done) continue;
    std::fprintf(stderr, "thread %u waits for ever\n", i);
    std::abort();
  }
}

inline void run_blocks() {
  for (unsigned y = 0; y < gridDim.y; ++y) {
    for (unsigned x = 0; x < gridDim.x; ++x) {
      blockIdx = {x, y, 0};
      run_block(blockDim.x);
    }
  }
}

extern "C" __attribute__((used)) inline void run_grid(void (*kernel)(const void*),
                                                      const unsigned* numbers,
                                                      const void* argument) {
  gridDim = {numbers[0], numbers[1], 1};
  blockDim = {numbers[2], 1, 1};
  the_block.kernel = kernel;
  the_block.argument = argument;
  the_grid = {numbers[5]};
  run_blocks();
  if (!the_grid.has_barrier) return;
  the_grid.passes_barrier = true;
  run_blocks();
}
