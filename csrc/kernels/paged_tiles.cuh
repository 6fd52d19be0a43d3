// The tiles of keys and values that a warp has on their way from a cache's pages to shared memory:
// where they come from, and where its lanes put and find them. Attention over 8 bits is limited by
// how many instructions it takes, not by bytes: addresses are computed once, as far as they can be.
#pragma once

#include "mma.cuh"
#include "paged_work.cuh"

// The compiler would rather compute these again in every turn of a loop.
__device__ void keep(unsigned& value) {
  asm volatile("" : "+r"(value));
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
  // Of the part of a sequence that this block is at:
  unsigned long long keys, values;  // where this lane's first copy comes from, in page 0
  const int* table;                 // the sequence's pages
  int key_begin, key_end;           // that any of the rows sees
  bool is_within_page;              // each tile
  unsigned page_lane;               // the token of a tile whose page this lane looks up

  // `memory` is at a multiple of 128 bytes, so that bits of an offset may be flipped in an address.
  __device__ PagedTiles(const PagedDecodeCall& call, const void* memory, int warp)
      : call(call), lane(threadIdx.x % kLanes) {
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
    // Distances within a page, of up to a tile, are numbers of 32 bits there.
    constexpr long long kMost = (1LL << 32) / kPagedKeys / kElement;
    is_within_page =
        1 << call.page_shift >= kPagedKeys && call.key_slot < kMost && call.value_slot < kMost;
    page_lane = is_within_page ? 0 : lane % kPagedKeys;
  }

  static __device__ unsigned offset_of(unsigned key, unsigned chunk) {
    return key * kRowBytes + (chunk ^ (key >> kFlipShift & kFlipped)) * 16;
  }
  // From the address for the first pair of chunks the one for another.
  static __device__ unsigned pair_at(unsigned first, int pair) {
    constexpr int kFlippedPairs = (kFlipped + 1) / 2;
    return (first ^ pair % kFlippedPairs * 32) + pair / kFlippedPairs * 128;
  }

  __device__ void start(int index, int head_kv, int key_begin, int key_end) {
    this->key_begin = key_begin;
    this->key_end = key_end;
    table = call.page_table + index * call.table_row;
    const long long slot = lane / kChunks, chunk = lane % kChunks * 16;
    keys = (unsigned long long)call.key_cache + chunk +
           (head_kv * call.key_head + slot * call.key_slot) * kElement;
    values = (unsigned long long)call.value_cache + chunk +
             (head_kv * call.value_head + slot * call.value_slot) * kElement;
    keep(keys);
    keep(values);
  }

  // The page of a tile from key `start` on, or of lane % 16's token of it; 0 where none is read.
  __device__ int page_of(int start) const {
    const int key = start + page_lane;
    return key < key_end ? table[key >> call.page_shift] : 0;
  }

  __device__ bool has_keys(int start) const {
    return start < key_end && start + kPagedKeys > key_begin;
  }

  // A tile, with what page_of said, to a stage.
  __device__ void send(int start, int page, unsigned stage) const {
    const unsigned to = stage + sent;
    if (is_within_page && start >= key_begin && start + kPagedKeys <= key_end) {
      const unsigned slot = start & ((1 << call.page_shift) - 1);
      send_whole(to, keys, page, slot, call.key_page, (unsigned)call.key_slot);
      send_whole(to + kTileBytes, values, page, slot, call.value_page, (unsigned)call.value_slot);
    } else {
      send_checked(start, page, to);
    }
  }

  // How far it is in a tile from the first copy to another, but for flipped bits.
  static __device__ unsigned copy_at(unsigned to, int copy) {
    return (to ^ (copy * kCopyKeys >> kFlipShift & kFlipped) * 16) + copy * kLanes * 16;
  }

  // All of it is to be read, and lies in one page.
  static __device__ void send_whole(unsigned to, unsigned long long from, int page, unsigned slot,
                                    long long page_stride, unsigned slot_stride) {
    const unsigned slot_bytes = slot_stride * kElement;
    from += page * (page_stride * kElement) + (unsigned long long)slot * slot_bytes;
    const unsigned step = kCopyKeys * slot_bytes;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_async(copy_at(to, i), (const void*)(from + (unsigned long long)step * i));
    }
  }

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
          copy_at(to + kTileBytes, i),
          (const void*)(values + (page * call.value_page + slot * call.value_slot) * kElement),
          is_there);
    }
  }
};
