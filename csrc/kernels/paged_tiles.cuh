// The tiles of keys and values that a warp has on their way from a cache's pages to shared memory:
// where they come from, and where its lanes put and find them. Of 8 bits there are so few bytes
// that instructions would take longer: addresses are computed once, as far as they can be.
#pragma once

#include "mma.cuh"
#include "paged_work.cuh"

// The value stays in a register: the compiler would rather compute it in every turn of a loop.
__device__ void keep(unsigned& value) {
  asm volatile("" : "+r"(value));
}
__device__ void keep(int& value) {
  asm volatile("" : "+r"(value));
}
__device__ void keep(float& value) {
  asm volatile("" : "+f"(value));
}
__device__ void keep(unsigned long long& value) {
  asm volatile("" : "+l"(value));
}

template <class Cache, int kSize>
struct PagedTiles {
  static constexpr int kLanes = 32;
  static constexpr int kElement = sizeof(typename Cache::Bits);
  static constexpr int kRowBytes = kSize * kElement;  // of a key, and of a value
  static constexpr int kChunks = kRowBytes / 16;      // of a key
  static constexpr int kPairs = kChunks / 2;          // of chunks, which are loaded at once
  static constexpr int kTileBytes = kPagedKeys * kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;  // the keys, and behind them the values
  static constexpr int kCopies = kTileBytes / 16 / kLanes;
  static constexpr int kCopyKeys = kPagedKeys / kCopies;
  // Chunks lie so that those of one number, of 8 keys, are in different banks: what is flipped in
  // the number are these bits of the key, from this one on.
  static constexpr unsigned kFlipped = kRowBytes == 64 ? 3 : 7, kFlipShift = kRowBytes == 64;

  const PagedDecodeCall& call;
  unsigned lane;
  unsigned begin, end;          // of this warp's stages, in shared memory
  unsigned sent;                // where in a tile this lane's first copy goes
  unsigned key_row, value_row;  // where in a tile is what it loads of the first pair of chunks
  // Distances in bytes, as numbers of 32 bits, where each tile is within a page.
  unsigned key_page, key_slot, value_page, value_slot;
  bool is_within_page;
  unsigned in_page;  // the bits of a token's number that say where in its page it is
  // Of the part of a sequence that this block is at:
  unsigned long long keys, values;  // where this lane's first copy comes from, in page 0
  unsigned long long table;         // the sequence's pages
  int key_begin, key_end;           // that any of the rows sees
  int whole_begin, whole_end;       // where a tile begins that all of is seen, and in one page
  unsigned page_lane;               // the token of a tile whose page this lane looks up

  // `memory` is at a multiple of 128 bytes, so that bits of an offset may be flipped in an address.
  __device__ PagedTiles(const PagedDecodeCall& call, const void* memory, int warp)
      : call(call),
        lane(threadIdx.x % kLanes),
        key_page((unsigned)(call.key_page * kElement)),
        key_slot((unsigned)(call.key_slot * kElement)),
        value_page((unsigned)(call.value_page * kElement)),
        value_slot((unsigned)(call.value_slot * kElement)) {
    keep(lane);
    begin = shared_address(memory) + warp * call.stages * kStageBytes;
    end = begin + call.stages * kStageBytes;
    sent = offset_of(lane / kChunks, lane % kChunks);
    key_row = offset_of(lane % 16, lane / 16);
    keep(begin);
    keep(sent);
    keep(key_row);
    value_row = key_row;
    if constexpr (kElement == 2) {
      value_row = offset_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
      keep(value_row);
    }
    constexpr long long kMost = (1LL << 32) / kElement;
    is_within_page = 1 << call.page_shift >= kPagedKeys && call.key_page < kMost &&
                     call.value_page < kMost && call.key_slot < kMost / kPagedKeys &&
                     call.value_slot < kMost / kPagedKeys;
    in_page = (1u << call.page_shift) - 1;
    keep(in_page);
    page_lane = is_within_page ? 0 : lane % kPagedKeys;
    keep(page_lane);
  }

  static __device__ unsigned offset_of(unsigned key, unsigned chunk) {
    return key * kRowBytes + (chunk ^ (key >> kFlipShift & kFlipped)) * 16;
  }
  // From the address for the first pair of chunks the one for another.
  static __device__ unsigned pair_at(unsigned first, int pair) {
    constexpr int kFlippedPairs = (kFlipped + 1) / 2;
    return (first ^ pair % kFlippedPairs * 32) + pair / kFlippedPairs * 128;
  }

  // By one instruction.
  static __device__ unsigned long long at(unsigned long long from, unsigned count, unsigned bytes) {
    unsigned long long address;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(count), "r"(bytes), "l"(from));
    return address;
  }

  __device__ void start(int index, int head_kv, int key_begin, int key_end) {
    this->key_begin = key_begin;
    this->key_end = key_end;
    whole_begin = is_within_page ? key_begin : key_end;
    whole_end = key_end - kPagedKeys + 1;
    keep(whole_begin);
    keep(whole_end);
    table = (unsigned long long)(call.page_table + index * call.table_row);
    const long long slot = lane / kChunks, chunk = lane % kChunks * 16;
    keys = (unsigned long long)call.key_cache + chunk +
           (head_kv * call.key_head + slot * call.key_slot) * kElement;
    values = (unsigned long long)call.value_cache + chunk +
             (head_kv * call.value_head + slot * call.value_slot) * kElement;
    keep(keys);
    keep(values);
    keep(table);
  }

  // The page of a tile from key `start` on, or of lane % 16's token of it; 0 where none is read.
  __device__ int page_of(int start) const {
    const int key = start + page_lane;
    if (key >= key_end) return 0;
    int page;
    asm("ld.global.nc.b32 %0, [%1];"
        : "=r"(page)
        : "l"(at(table, key >> call.page_shift, sizeof(int))));
    return page;
  }

  // A tile, with what page_of said, to a stage.
  __device__ void send(int start, int page, unsigned stage) const {
    const unsigned to = stage + sent;
    if (start >= whole_begin && start < whole_end) {
      const unsigned slot = start & in_page;
      send_whole<0>(to, at(at(keys, page, key_page), slot, key_slot), key_slot);
      send_whole<kTileBytes>(to, at(at(values, page, value_page), slot, value_slot), value_slot);
    } else {
      send_checked(start, page, to);
    }
  }

  // How far it is in a tile from the first copy to another, but for flipped bits.
  static __device__ unsigned copy_at(unsigned to, int copy) {
    return (to ^ (copy * kCopyKeys >> kFlipShift & kFlipped) * 16) + copy * kLanes * 16;
  }

  // All of it is to be read, and it lies in one page.
  template <int kOffset>
  static __device__ void send_whole(unsigned to, unsigned long long from, unsigned slot) {
#pragma unroll
    for (unsigned i = 0; i < kCopies; ++i) {
      copy_async(copy_at(to, i) + kOffset, (const void*)at(from, i, kCopyKeys * slot));
    }
  }

  // Some of it is not to be read, or it lies in several pages.
  __device__ void send_checked(int start, int page_of_lane, unsigned to) const {
    const int first = lane / kChunks;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int key = start + first + i * kCopyKeys;
      const long long page = __shfl_sync(~0u, page_of_lane, key - start);
      const long long slot = (key & ((1 << call.page_shift) - 1)) - first;
      const bool is_there = key >= key_begin && key < key_end;
      copy_async(copy_at(to, i),
                 (const void*)(keys + (page * call.key_page + slot * call.key_slot) * kElement),
                 is_there);
      copy_async(
          copy_at(to, i) + kTileBytes,
          (const void*)(values + (page * call.value_page + slot * call.value_slot) * kElement),
          is_there);
    }
  }
};
