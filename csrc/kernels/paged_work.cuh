// Which keys a sequence's queries see, and so how much work there is: for the plan, and for what is
// computed by it.
#pragma once

#include "paged_decode_call.h"

// What a plan is made for, by words.
__device__ int paged_head(const PagedWork& work, int word) {
  const int words[kPagedHead] = {work.rows, work.batch, work.queries,      work.group,
                                 work.left, work.right, work.bottom_right, 0};
  return words[word];
}

struct PagedSequence {
  int keys, queries, first_query;
  int shift;  // query i's own key is i + shift

  __device__ PagedSequence(const PagedWork& work, int index) {
    first_query = work.cu_seqlens_q == nullptr ? 0 : work.cu_seqlens_q[index];
    queries =
        work.cu_seqlens_q == nullptr ? work.queries : work.cu_seqlens_q[index + 1] - first_query;
    keys = max(work.seq_lens_kv[index], 0);
    shift = work.bottom_right ? keys - queries : 0;
  }
  // The first key that a query sees, and the first behind those.
  __device__ int begin(const PagedWork& work, int query) const {
    return work.left < 0 ? 0 : min(max(query + shift - work.left, 0), keys);
  }
  __device__ int end(const PagedWork& work, int query) const {
    return work.right < 0 ? keys : min(max(query + shift + work.right + 1, 0), keys);
  }
};

// What all queries of a sequence see, in units; at least one, in which is written what belongs to
// queries without keys.
struct PagedSpan {
  int first, units;  // of each block of rows, a part of the work
  int row_blocks;

  __device__ PagedSpan(const PagedWork& work, const PagedSequence& sequence) {
    const int last = max(sequence.queries - 1, 0);
    first = sequence.begin(work, 0) / kPagedUnit;
    units = max((sequence.end(work, last) + kPagedUnit - 1) / kPagedUnit - first, 1);
    row_blocks = (sequence.queries * work.group + work.rows - 1) / work.rows;
  }
  // Of a part: short ones are no better than a share of long ones.
  __device__ int cost() const {
    return kPagedBeginning + units;
  }
};
