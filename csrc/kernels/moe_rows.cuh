// Where the rows of a token lie.
#pragma once

#include "moe_rows_call.h"

// A row of a token; neither is there if what was given as a position is none.
struct RowPlace {
  bool has_expert, is_empty;
  unsigned row;
};

__device__ RowPlace place_of(const MoePositions& positions, long long pair) {
  const int given = positions.of_pairs[pair];
  const unsigned row = given < 0 ? ~given : given;
  const bool is_there = row < positions.rows;
  return {is_there && given >= 0, is_there && given < 0, row};
}
