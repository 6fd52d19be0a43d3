// What CUDA sources need to run on a CPU: the threads of a block as fibers, which take turns where
// they wait for one another; a warp's operations; copies that arrive as soon as they are sent, or no
// sooner than they are waited for; and PTX instructions by name, with operands in the order of the
// instruction's text (kernels.py turns inline assembly into such calls).
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

using std::fabs;
using std::max;
using std::min;

struct Index {
  unsigned x = 0, y = 0;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulated {

constexpr int kLanes = 32;
constexpr size_t kStack = 256 << 10;

struct Copy {
  void* to;
  uint8_t bytes[16];
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Index index;
  bool is_done = false;
  long long warp_turn = 0, block_turn = 0, cluster_turn = 0;  // how many barriers it has come to
  std::vector<Copy> sent;                   // not yet in a group
  std::deque<std::vector<Copy>> groups;
};

struct Slot {
  uint32_t words[8];
};
struct Warp {
  Slot slots[2][kLanes];  // by turns, so that one barrier does
};

struct Block {
  Index index;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<uint8_t> shared;
};

struct Gpu {
  std::vector<Block> cluster;  // the blocks that there are at once
  Block* block = nullptr;      // and the one that runs
  ucontext_t scheduler;
  Thread* current = nullptr;
  Index grid, threads_of_block;
  bool copies_at_once = false;  // in place of when they are waited for
};
inline Gpu gpu;

inline Thread& self() {
  return *gpu.current;
}
inline int lane() {
  return self().index.x % kLanes;
}
inline Warp& warp() {
  return gpu.block->warps[self().index.x / kLanes];
}
inline uint8_t* shared_memory_of(Block& block) {
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(block.shared.data()) + 127) &
                                    ~uintptr_t{127});
}
inline uint8_t* shared_memory() {
  return shared_memory_of(*gpu.block);
}

// Until all threads from first on, that have not ended, have come as far.
inline void wait_for(size_t first, size_t count, long long Thread::* turn) {
  const long long mine = ++(self().*turn);
  const auto all_came = [&] {
    for (size_t i = first; i < first + count; ++i) {
      const Thread& thread = gpu.block->threads[i];
      if (!thread.is_done && thread.*turn < mine) return false;
    }
    return true;
  };
  while (!all_came()) swapcontext(&self().context, &gpu.scheduler);
}
// Until all threads of the cluster have come as far: none of them ends before.
inline void wait_for_cluster() {
  const long long mine = ++self().cluster_turn;
  const auto came = [&](const Thread& thread) { return thread.cluster_turn >= mine; };
  const auto all_came = [&](const Block& block) { return std::ranges::all_of(block.threads, came); };
  while (!std::ranges::all_of(gpu.cluster, all_came)) {
    swapcontext(&self().context, &gpu.scheduler);
  }
}
inline void wait_for_warp() {
  wait_for(self().index.x / kLanes * kLanes, kLanes, &Thread::warp_turn);
}

// What each lane brings, seen by all.
inline const Slot* exchange(const Slot& mine) {
  Slot* slots = warp().slots[self().warp_turn % 2];
  slots[lane()] = mine;
  wait_for_warp();
  return slots;
}

template <class T>
T from_lane(T value, int source) {
  static_assert(sizeof(T) <= sizeof(Slot));
  Slot slot{};
  std::memcpy(&slot, &value, sizeof value);
  std::memcpy(&value, &exchange(slot)[source & (kLanes - 1)], sizeof value);
  return value;
}

inline float from_half(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
inline uint16_t to_half(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}
inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_e4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float value = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  if ((bits & 0x7f) == 0x7f) value = NAN;
  return bits & 0x80 ? -value : value;
}
inline float from_e5m2(uint8_t bits) {
  return from_half(static_cast<uint16_t>(bits << 8));
}
// To the nearest number with a code of at most `most`, ties to even codes.
template <float (*read)(uint8_t)>
uint8_t to_fp8(float value, int most) {
  if (std::isnan(value)) return 0x7f;
  uint8_t nearest = 0;
  const float magnitude = std::min(std::fabs(value), read(static_cast<uint8_t>(most)));
  for (int bits = 1; bits <= most; ++bits) {
    const float was = std::fabs(read(nearest) - magnitude);
    const float is = std::fabs(read(static_cast<uint8_t>(bits)) - magnitude);
    if (is < was || (is == was && bits % 2 == 0)) nearest = static_cast<uint8_t>(bits);
  }
  return nearest | (std::signbit(value) ? 0x80 : 0);
}
inline uint8_t to_e4m3(float value) {
  return to_fp8<from_e4m3>(value, 0x7e);
}
inline uint8_t to_e5m2(float value) {
  return to_fp8<from_e5m2>(value, 0x7b);
}

// d = a b + c of a warp, with fragments as the PTX manual lays them out, for m16n8k16.
template <float (*read)(uint16_t)>
void multiply(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
              uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  const Slot* slots = exchange({{a0, a1, a2, a3, b0, b1}});
  const auto half_of = [](uint32_t word, int i) { return read(uint16_t(word >> (16 * i))); };
  const auto a = [&](int row, int k) {
    return half_of(slots[row % 8 * 4 + k % 8 / 2].words[row / 8 + k / 8 * 2], k % 2);
  };
  const auto b = [&](int k, int column) {
    return half_of(slots[column * 4 + k % 8 / 2].words[4 + k / 8], k % 2);
  };
  const int row = lane() / 4, column = lane() % 4 * 2;
  const auto element = [&](int r, int n, float c) {
    double sum = c;
    for (int k = 0; k < 16; ++k) sum += static_cast<double>(a(r, k)) * b(k, n);
    return static_cast<float>(sum);
  };
  d0 = element(row, column, c0);
  d1 = element(row, column + 1, c1);
  d2 = element(row + 8, column, c2);
  d3 = element(row + 8, column + 1, c3);
}

inline void arrive(size_t most) {
  auto& groups = self().groups;
  while (groups.size() > most) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.bytes, sizeof copy.bytes);
    groups.pop_front();
  }
}

}  // namespace emulated

#define threadIdx (emulated::self().index)
#define blockIdx (emulated::gpu.block->index)
#define gridDim (emulated::gpu.grid)
#define blockDim (emulated::gpu.threads_of_block)

inline void __syncthreads() {
  emulated::wait_for(0, emulated::gpu.block->threads.size(), &emulated::Thread::block_turn);
}
inline void __syncwarp() {
  emulated::wait_for_warp();
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulated::from_lane(value, source);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::from_lane(value, emulated::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const T other = emulated::from_lane(value, std::max(emulated::lane() - step, 0));
  return emulated::lane() >= step ? other : value;
}
// A bit for each lane.
inline unsigned __ballot_sync(unsigned, bool is_so) {
  const emulated::Slot* slots = emulated::exchange({{is_so}});
  unsigned lanes = 0;
  for (int i = 0; i < emulated::kLanes; ++i) lanes |= slots[i].words[0] << i;
  return lanes;
}
inline int __reduce_max_sync(unsigned, int value) {
  int most = value;
  for (int i = 0; i < emulated::kLanes; ++i) most = max(most, emulated::from_lane(value, i));
  return most;
}
inline int __reduce_add_sync(unsigned, int value) {
  int sum = 0;
  for (int i = 0; i < emulated::kLanes; ++i) sum += emulated::from_lane(value, i);
  return sum;
}
inline bool __any_sync(unsigned all, bool is_so) {
  return __ballot_sync(all, is_so) != 0;
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  return __uint_as_float(static_cast<unsigned>(bits));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (both >> (8 * (selectors >> (4 * i) & 7)) & 0xff) << 8 * i;
  return result;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<size_t>(static_cast<const uint8_t*>(pointer) - emulated::shared_memory());
}

namespace ptx {

using namespace emulated;

inline void cvt_f32_f16(float& to, uint16_t from) {
  to = from_half(from);
}
inline void cvt_rn_f16_f32(uint16_t& to, float from) {
  to = to_half(from);
}
inline void cvt_rn_bf16_f32(uint16_t& to, float from) {
  to = to_bfloat16(from);
}
inline void max_NaN_f32(float& to, float one, float other) {
  to = std::isnan(one) || std::isnan(other) ? NAN : std::max(one, other);
}
inline void cvt_rn_f16x2_f32(uint32_t& to, float high, float low) {
  to = to_half(low) | static_cast<uint32_t>(to_half(high)) << 16;
}
inline void cvt_rn_bf16x2_f32(uint32_t& to, float high, float low) {
  to = to_bfloat16(low) | static_cast<uint32_t>(to_bfloat16(high)) << 16;
}
inline void cvt_rn_f16x2_e4m3x2(uint32_t& to, uint16_t from) {
  to = to_half(from_e4m3(from & 0xff)) |
       static_cast<uint32_t>(to_half(from_e4m3(static_cast<uint8_t>(from >> 8)))) << 16;
}
inline void cvt_rn_satfinite_e4m3x2_f32(uint16_t& to, float high, float low) {
  to = static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8);
}
inline void cvt_rn_satfinite_e5m2x2_f32(uint16_t& to, float high, float low) {
  to = static_cast<uint16_t>(to_e5m2(low) | to_e5m2(high) << 8);
}
inline void mul_rn_f16x2(uint32_t& to, uint32_t a, uint32_t b) {
  const auto product = [&](int i) {
    return to_half(from_half(uint16_t(a >> i)) * from_half(uint16_t(b >> i)));
  };
  to = product(0) | static_cast<uint32_t>(product(16)) << 16;
}
inline void ex2_approx_ftz_f32(float& to, float from) {
  to = std::exp2(from);
  if (to < 0x1p-126f) to = 0;  // NaN is not
}
inline void mad_wide_u32(unsigned long long& to, uint32_t a, uint32_t b, unsigned long long c) {
  to = static_cast<unsigned long long>(a) * b + c;
}
inline void ld_global_nc_b32(int& to, unsigned long long from) {
  std::memcpy(&to, reinterpret_cast<const void*>(from), sizeof to);
}
inline void atom_add_acq_rel_gpu_global_s32(int& before, int* to, int value) {
  before = *to;
  *to += value;
}
inline void barrier_cluster_arrive_relaxed_aligned() {
}
inline void barrier_cluster_arrive_release_aligned() {
}
inline void barrier_cluster_wait_acquire_aligned() {
  emulated::wait_for_cluster();
}
// The block stands above the address.
constexpr unsigned kBlockShift = 24;
inline void mapa_shared__cluster_u32(uint32_t& to, uint32_t address, int block) {
  to = address | static_cast<uint32_t>(block) << kBlockShift;
}
template <class... Floats>
void store_to_cluster(uint32_t address, Floats... from) {
  auto& block = emulated::gpu.cluster.at(address >> kBlockShift);
  auto* to = emulated::shared_memory_of(block) + (address & ((1u << kBlockShift) - 1));
  ((std::memcpy(to, &from, sizeof from), to += sizeof from), ...);
}
inline void st_shared__cluster_v4_f32(uint32_t address, float x, float y, float z, float w) {
  store_to_cluster(address, x, y, z, w);
}
inline void st_shared__cluster_v2_f32(uint32_t address, float x, float y) {
  store_to_cluster(address, x, y);
}
// What group norms read of a cluster, which are emulated elsewhere: no kernel comes here.
inline void ld_shared__cluster_v2_f32(float&, float&, uint32_t) {
  std::abort();
}
inline void mov_u32(uint32_t&) {
  std::abort();
}
inline void griddepcontrol_wait() {
}
inline void griddepcontrol_launch_dependents() {
}
inline void prefetch_global_L2(const void* from) {
  const volatile char there = *static_cast<const char*>(from);
  (void)there;
}
inline void mov_b32(uint16_t& low, uint16_t& high, uint32_t from) {
  low = static_cast<uint16_t>(from);
  high = static_cast<uint16_t>(from >> 16);
}
inline void cp_async_cg_shared_global_L2__128B(uint32_t to, const void* from, int bytes,
                                               int there = 16) {
  Copy copy{shared_memory() + to, {}};
  if (there > 0) std::memcpy(copy.bytes, from, static_cast<size_t>(std::min(there, bytes)));
  if (gpu.copies_at_once) std::memcpy(copy.to, copy.bytes, sizeof copy.bytes);
  self().sent.push_back(copy);
}
inline void cp_async_commit_group() {
  self().groups.push_back(std::move(self().sent));
  self().sent.clear();
}
inline void cp_async_wait_group(int most) {
  arrive(static_cast<size_t>(most));
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                     uint32_t& r3, uint32_t row) {
  const Slot* slots = exchange({{row}});
  uint32_t* results[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    const uint32_t from = slots[matrix * 8 + lane() / 4].words[0];
    std::memcpy(results[matrix], shared_memory() + from + lane() % 4 * 4, sizeof(uint32_t));
  }
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                           uint32_t& r3, uint32_t row) {
  const Slot* slots = exchange({{row}});
  uint32_t* results[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; ++matrix) {
    *results[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      uint16_t element;
      const uint32_t from = slots[matrix * 8 + lane() % 4 * 2 + i].words[0];
      std::memcpy(&element, shared_memory() + from + lane() / 4 * 2, sizeof element);
      *results[matrix] |= static_cast<uint32_t>(element) << (16 * i);
    }
  }
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& to, uint32_t from) {
  const Slot* slots = exchange({{from}});
  to = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t two = slots[(lane() % 4 * 2 + i) * 4 + lane() / 8].words[0];
    to |= (two >> (16 * (lane() / 4 % 2)) & 0xffff) << (16 * i);
  }
}
constexpr auto mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32 = multiply<from_bfloat16>;
constexpr auto mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32 = multiply<from_half>;

}  // namespace ptx

namespace emulated {

// Until all of its threads have ended or come to one of the cluster's barriers; whether some have
// not ended.
inline bool run_alone(Block& block) {
  gpu.block = &block;
  const auto turns = [&block] {
    long long sum = 0;
    for (const Thread& thread : block.threads) {
      sum += thread.warp_turn + thread.block_turn + thread.cluster_turn + thread.is_done;
    }
    return sum;
  };
  long long before, after = turns();
  do {
    before = after;
    for (Thread& thread : block.threads) {
      if (thread.is_done) continue;
      gpu.current = &thread;
      swapcontext(&gpu.scheduler, &thread.context);
    }
    after = turns();
  } while (after != before);
  return !std::ranges::all_of(block.threads, [](const Thread& thread) { return thread.is_done; });
}

// One block or cluster of them after the other, in an order that the seed says, and with it when
// copies arrive; what shared memory holds is NaN. What blocks declare as shared memory is one for
// all: those of a cluster take turns only where they wait for each other.
template <class Call>
void launch(void (*kernel)(const Call), const Call& call, unsigned blocks, unsigned rows,
            unsigned threads, size_t shared_bytes, unsigned seed, unsigned cluster) {
  gpu.grid = {blocks, rows};
  gpu.threads_of_block = {threads, 1};
  gpu.copies_at_once = seed % 2 == 1;
  std::vector<Index> order;  // of the first blocks of clusters
  for (unsigned i = 0; i < blocks * rows; i += cluster) order.push_back({i % blocks, i / blocks});
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  static void (*body)(const Call);
  static const Call* argument;
  body = kernel;
  argument = &call;
  gpu.cluster.resize(cluster);
  for (const Index& first : order) {
    for (unsigned k = 0; k < cluster; ++k) {
      Block& block = gpu.cluster[k];
      block.index = {first.x + k, first.y};
      block.shared.assign(shared_bytes + 256, 0xff);
      block.warps.assign((threads + kLanes - 1) / kLanes, {});
      block.threads.resize(threads);
      for (unsigned i = 0; i < threads; ++i) {
        Thread& thread = block.threads[i];
        thread.index = {i, 0};
        thread.is_done = false;
        thread.warp_turn = thread.block_turn = thread.cluster_turn = 0;
        thread.sent.clear();
        thread.groups.clear();
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = kStack;
        thread.context.uc_link = &gpu.scheduler;
        void (*entry)() = [] {
          body(*argument);
          self().is_done = true;
        };
        makecontext(&thread.context, entry, 0);
      }
    }
    for (bool is_running = true; is_running;) {
      is_running = false;
      for (Block& block : gpu.cluster) is_running |= run_alone(block);
    }
  }
}

}  // namespace emulated
