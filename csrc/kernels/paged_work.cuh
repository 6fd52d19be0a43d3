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

// Whether every query sees every key: then there is less to compute, on the way to the first keys.
__device__ bool sees_all(const PagedWork& work) {
  return work.left < 0 && work.right < 0;
}

struct PagedSequence {
  int keys, queries, first_query;
  int shift;  // query i's own key is i + shift

  PagedSequence() = default;
  __device__ PagedSequence(const PagedWork& work, int index)
      : PagedSequence(work, index, work.seq_lens_kv[index]) {
  }
  __device__ PagedSequence(const PagedWork& work, int index, int length) {
    first_query = work.cu_seqlens_q == nullptr ? 0 : work.cu_seqlens_q[index];
    queries =
        work.cu_seqlens_q == nullptr ? work.queries : work.cu_seqlens_q[index + 1] - first_query;
    keys = max(length, 0);
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

// A sequence's queries with the heads of one group, or as many of them as a block takes at once.
struct PagedPart {
  int index, head_kv, row_start, rows;
  PagedSequence sequence;

  __device__ int query_of(const PagedWork& work, int row) const {
    return (row_start + row) / work.group;
  }
  __device__ int head_of(const PagedWork& work, int row) const {
    return head_kv * work.group + (row_start + row) % work.group;
  }
};

// What all queries of a sequence see, in units; at least one, in which is written what belongs to
// queries without keys.
struct PagedSpan {
  int first, units;  // of each block of `rows`, a part of the work
  int row_blocks;

  __device__ PagedSpan(const PagedWork& work, const PagedSequence& sequence, int rows) {
    int end = sequence.keys;
    first = 0;
    if (!sees_all(work)) {
      first = sequence.begin(work, 0) / kPagedUnit;
      end = sequence.end(work, max(sequence.queries - 1, 0));
    }
    units = max((end + kPagedUnit - 1) / kPagedUnit - first, 1);
    row_blocks = (sequence.queries * work.group + rows - 1) / rows;
  }
  // Of a part: short ones are no better than a share of long ones.
  __device__ int cost() const {
    return kPagedBeginning + units;
  }
};
