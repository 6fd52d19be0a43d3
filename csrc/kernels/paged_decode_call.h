// The arguments of the kernels of paged_plan.cu and paged_decode.cu, for both sides.
#pragma once

constexpr int kPagedUnit = 64;          // tokens of a unit of work
constexpr int kPagedKeys = 16;          // tokens that a warp takes at once
constexpr int kPagedBeginning = 2;      // units that take as long as beginning and ending a part
constexpr int kPagedWarps = 4;          // of a block; together they take a unit
constexpr int kPagedMostBlocks = 1024;  // of a launch
// The most sequences whose lengths every block adds up by itself: they need no plan.
constexpr int kPagedCounted = 128;
constexpr int kPagedMostStages = 4;
constexpr int kPagedMostParts = 8;  // blocks of a cluster
constexpr int kPagedLine = 128;     // bytes that come from memory together

// A plan has a counter for each block, what it was made for, and batch + 1 sums: how many units,
// with those for beginnings, come before each sequence, if there were one head of keys.
constexpr int kPagedCounters = kPagedMostBlocks;
constexpr int kPagedSlots = 64;  // streams that may have calls without a plan
constexpr int kPagedHead = 8;    // words
constexpr int kPagedSums = kPagedCounters + kPagedHead;

// What work there is, in each sequence; the same for the plan and for what is computed by it.
struct PagedWork {
  const int* seq_lens_kv;     // [batch]
  const int* cu_seqlens_q;    // [batch + 1]; null: each sequence has `queries`
  int batch, queries, group;  // with cu_seqlens_q `queries` is 0
  int left, right;            // keys on each side of a query's own that it sees; -1: all
  int bottom_right;
  int rows;  // of queries and their heads, of a block
};

struct PagedPlanCall {
  PagedWork work;
  int* plan;
};

// Strides in elements.
struct PagedDecodeCall {
  PagedWork work;
  const int* plan;  // null: none
  int* counters;    // of kPagedCounters, which are zero, and are again at the end
  int slot;         // of the kernel's own counters, where there are no others
  const void *query, *key_cache, *value_cache;
  const int* page_table;
  const float *descale_k, *descale_v;  // null: 1
  const float* sinks;                  // null: none
  void* out;
  float* lse;       // null: not wanted
  float* partials;  // of each block two, of `rows` rows: the numbers, then highest score and sum
  long long query_batch, query_token, query_head;
  long long key_page, key_slot, key_head, value_page, value_slot, value_head, table_row;
  long long out_token, lse_batch, lse_token, lse_head;  // the output's heads lie densely
  int heads_kv;
  int table_lines;                     // of kPagedLine bytes, the page table's first ones
  int page_shift;                      // a page has 2 to the power of it tokens
  int descale_k_step, descale_v_step;  // to the next head of keys
  int table_width;                     // pages of a sequence
  int stages;                          // of tiles on their way, 2 to kPagedMostStages
  int parts;                           // blocks of a cluster, where there are clusters
  float scale, softcap;
};
