// What the kernels of group norm are called with: one header for both sides.
#pragma once

// Of group_norm_resident.cuh: copies of a thread that are under way at the same time, a power of
// two.
constexpr unsigned kGroupNormAhead = 8;

// How a block's channels and positions are spread over its threads. A thread has a slot, the
// channels of a piece where channels are last in memory and else one channel, and a lane, which
// says with which position it begins; the other threads of the slot have those between. Threads
// beyond slots * lanes only wait.
struct GroupNormSpread {
  unsigned slots, lanes;
  unsigned turns;      // in which the slots go through the block's channels
  unsigned channels;   // of a block
  unsigned strips;     // blocks for all channels
  unsigned stretches;  // blocks that share the positions of a sample's channels
  unsigned stretch;    // positions of a block: pieces of them where channels are first
  unsigned kept;       // bytes of shared memory for pieces; 0: none are kept
  unsigned scratch;    // bytes of shared memory for joining what the threads of a slot found
  bool has_groups;  // whole groups, in the strip: what a block finds is joined to one part of each
  // Of group_norm_products.cuh: classes of the rows of eight pieces that have the same slots, warps
  // that share a class, and stages in which pieces arrive, of so many turns each.
  unsigned classes, shares, stages;
  // Of group_norm_resident.cuh: pieces that each thread keeps; whether there are others, which go
  // through shared memory, and so many at a time.
  unsigned staying;
  bool streams;
};

// How groups are spread over the threads of blocks that hold them in registers
// (group_norm_held.cu).
struct GroupNormHold {
  unsigned lanes;    // threads of a group: a power of two up to 32, or all of the block
  unsigned side;     // groups whose threads alternate in a warp, a power of two
  unsigned groups;   // of a block
  unsigned vectors;  // pieces of a group
  unsigned row_vectors, row_step;  // pieces side by side, and from one row of them to the next
  // By which a piece's number gives its row, or where channels are first a number's its channel: a
  // product with it, over 2^31, rounded down. 0: there is one.
  unsigned multiplier;
  bool is_split;  // pieces may have two channels
};

struct GroupNormCall {
  const void *input, *residual, *grad_out, *grad_sum;  // null: absent
  const void *weight, *bias;                           // null: absent
  void *out, *sum;     // the backward's out: the gradient of the input; null: not wanted
  float *mean, *rstd;  // [samples, groups]; the forward writes them
  float* partial;      // [2, samples * stretches, channels], or groups: see has_groups
  // The backward's, [samples * stretches, groups, 2], or of blocks that wait for each other and
  // have parts of groups [samples * groups, stretches, 2]; null: no groups.
  float* group_partial;
  float* slopes;                  // [samples, groups, 2]: see group_norm_backward.cu
  void *grad_weight, *grad_bias;  // null: not wanted
  unsigned samples, channels, groups, positions;
  float eps;
  bool is_channels_last, is_weight_float, is_bias_float, has_silu;
  GroupNormSpread spread;
  GroupNormHold hold;
};
