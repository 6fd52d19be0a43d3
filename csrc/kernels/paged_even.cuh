// Few sequences: each pair of a sequence and a head of keys has a cluster of blocks, all warps of
// which take tiles in turns. So a block knows where its first tiles are before it knows the length,
// and the sums of a pair meet in shared memory. Equal shares of all pairs (paged_decode.cu) have
// neither: what a block has is known behind all lengths, and its sums go through global memory,
// which of few tokens takes longer than unequal shares do.
#pragma once

#include "cluster.cuh"
#include "paged_sums.cuh"
#include "threads.cuh"

// Of queries that see the first key, in one block of rows.
template <class Query, class Cache, int kSize, int kRows, int kWarps>
struct PagedEven : PagedSums<Query, Cache, kSize, kRows, kWarps> {
  using Base = PagedSums<Query, Cache, kSize, kRows, kWarps>;
  using Base::add_values;
  using Base::Base;
  using Base::call;
  using Base::find_scores;
  using Base::key_begin;
  using Base::key_end;
  using Base::kGroups;
  using Base::kThreads;
  using Base::load_queries;
  using Base::page;
  using Base::part;
  using Base::put_sums;
  using Base::row_end;
  using Base::shown_begin;
  using Base::shown_end;
  using Base::start_rows;
  using Base::sums_of_warps;
  using Base::tile_begin;
  using Base::tile_end;
  using Base::tiles;
  using Base::warp;
  using Base::weigh;
  using Base::write;
  using typename Base::Sums;
  using typename Base::Tiles;

  int step;  // keys from one of this warp's tiles to its next

  // Of a tile that begins there, what was looked up before the length was known.
  __device__ int page_if_read(int start, int page_there) const {
    return start + (int)tiles.page_lane < tile_end ? page_there : 0;
  }

  __device__ void send(int start, unsigned stage) const {
    if (start < tile_end) tiles.send(start, page, stage);
    end_copies();
  }

  // This warp's tiles. Each makes room for a later one: all stages are on their way while the warp
  // waits.
  __device__ void attend() {
    unsigned stage = tiles.begin;
    for (int start = tile_begin; start < tile_end; start += step) {
      const int to_send = start + call.stages * step, next = tiles.page_of(to_send + step);
      if (call.stages == 2) {
        wait_for_copies<1>();
      } else if (call.stages == 3) {
        wait_for_copies<2>();
      } else {
        wait_for_copies<3>();
      }
      __syncwarp();
      float scores[kGroups][4];
      find_scores(stage + tiles.key_row, scores);
      unsigned weights[kGroups][2];
      weigh(start, scores, weights);
      add_values(stage + tiles.value_row, weights);
      __syncwarp();
      send(to_send, stage);
      page = next;
      stage = stage + Tiles::kStageBytes == tiles.end ? tiles.begin : stage + Tiles::kStageBytes;
    }
    wait_for_copies<0>();
  }

  // What the blocks of a cluster have found, each added up by itself, becomes the result, of which
  // each writes a share: the others put theirs into its shared memory.
  __device__ void meet(int rank) const {
    constexpr int kPieces = kSize / 4;
    const int items = part.rows * kPieces, share = (items + call.parts - 1) / call.parts;
    auto* const values = (float4*)(row_end + kRows);                            // [parts][share]
    auto* const words = (float2*)(values + kRows * kPieces + kPagedMostParts);  // [parts][kRows]
    wait_in_cluster();                                                          // all have begun
    for (int i = threadIdx.x; i < items; i += kThreads) {
      const Sums sums = sums_of_warps(i / kPieces, i % kPieces * 4);
      const int owner = i / share, in_share = i - owner * share;
      store_to_block(values + rank * share + in_share, owner,
                     {sums.values[0], sums.values[1], sums.values[2], sums.values[3]});
      if (in_share == 0 || i % kPieces == 0) {  // the first of a row that the owner has
        store_to_block(words + rank * kRows + i / kPieces, owner, {sums.highest, sums.sum});
      }
    }
    arrive_in_cluster();
    wait_in_cluster();
    const int begin = rank * share, end = min(begin + share, items);
    for (int i = begin + threadIdx.x; i < end; i += kThreads) {
      Sums sums;
#pragma unroll
      for (int block = 0; block < kPagedMostParts; ++block) {
        if (block < call.parts) {
          const float2 word = words[block * kRows + i / kPieces];
          sums.add(word.x, word.y, values[block * share + i - begin]);
        }
      }
      write(part, i / kPieces, i % kPieces * 4, sums);
    }
  }

  __device__ void run() {
    const int pair = blockIdx.x / call.parts, rank = blockIdx.x - pair * call.parts;
    // Neighbours are of different sequences, which may be unlike.
    part.head_kv = pair / call.work.batch;
    part.index = pair - part.head_kv * call.work.batch;
    part.row_start = 0;
    part.rows = call.work.queries * call.work.group;
    step = kWarps * kPagedKeys * call.parts;
    tile_begin = (rank * kWarps + warp) * kPagedKeys;
    begin_in_cluster();
    wait_for_inputs();
    let_next_start();
    // With the length, and not behind it.
    const int* const table = call.page_table + part.index * call.table_row;
    int pages[kPagedMostStages + 1];
#pragma unroll
    for (int i = 0; i <= kPagedMostStages; ++i) {
      const int key = tile_begin + i * step + (int)tiles.page_lane;
      pages[i] = table[min(key >> call.page_shift, call.table_width - 1)];
    }
    part.sequence = PagedSequence(call.work, part.index);
    key_begin = shown_begin = 0;
    key_end = tile_end = part.sequence.end(call.work, call.work.queries - 1);
    shown_end = part.sequence.end(call.work, 0);
    tiles.start(part.index, part.head_kv, key_begin, key_end);
    page = page_if_read(tile_begin, pages[0]);
#pragma unroll
    for (int i = 0; i < kPagedMostStages; ++i) {
      if (i < call.stages) {
        send(tile_begin + i * step, tiles.begin + i * Tiles::kStageBytes);
        page = page_if_read(tile_begin + (i + 1) * step, pages[i + 1]);
      }
    }
    load_queries();
    start_rows();
    __syncthreads();
    attend();
    put_sums();
    meet(rank);
  }
};
