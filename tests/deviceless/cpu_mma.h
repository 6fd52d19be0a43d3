// What csrc/kernels/mma.cuh has, for a CPU: a warp's threads show each other what they have.
#pragma once

#include "number.cuh"

inline void copy_async(void* to, const void* from, bool is_there) {
  if (is_there) {
    std::memcpy(to, from, 16);
  } else {
    std::memset(to, 0, 16);
  }
}
inline void end_copies() {
}
template <int kGroups>
void wait_for_copies() {
}

struct Shown {
  const void* row;
  unsigned a[4], b[2];
};
inline Shown shown[Block::kMostThreads];

inline void load_rows(unsigned (&to)[4], const void* row) {
  const unsigned me = threadIdx.x, warp = me / 32 * 32, lane = me % 32;
  shown[me].row = row;
  the_block.meet_warp();
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const auto* bytes = static_cast<const char*>(shown[warp + matrix * 8 + lane / 4].row);
    std::memcpy(&to[matrix], bytes + lane % 4 * 4, 4);
  }
  the_block.meet_warp();
}

template <class Type>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const unsigned me = threadIdx.x, warp = me / 32 * 32, lane = me % 32;
  for (int i = 0; i < 4; ++i) shown[me].a[i] = a[i];
  shown[me].b[0] = b0, shown[me].b[1] = b1;
  the_block.meet_warp();
  const auto half = [](unsigned both, unsigned which) {
    return Type::read(static_cast<typename Type::Bits>(both >> 16 * which));
  };
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, column = lane % 4 * 2 + i % 2;
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned of_a = shown[warp + row * 4 + k % 8 / 2].a[i / 2 + k / 8 * 2];
      const unsigned of_b = shown[warp + column * 4 + k % 8 / 2].b[k / 8];
      c[i] += half(of_a, k % 2) * half(of_b, k % 2);
    }
  }
  the_block.meet_warp();
}
