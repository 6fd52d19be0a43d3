// Products of small matrices by a warp, and what brings them there: PTX of compute capability 8.0.
#pragma once

#include "number.cuh"

__device__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

// 16 bytes of global memory on their way to shared memory, or zeros.
__device__ void copy_async(unsigned to, const void* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ void copy_async(void* to, const void* from, bool is_there) {
  copy_async(shared_address(to), from, is_there);
}

// The same to an address of shared memory, of bytes that are there.
__device__ void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}

// What was sent since the last call is a group.
__device__ void end_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until no more than the last kGroups groups are on their way.
template <int kGroups>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four matrices of 8 rows of 16 bytes: lane i has the address of row i % 8 of matrix i / 8, and
// gets the elements [2 * (i % 4)] and [2 * (i % 4) + 1] of row i / 4.
__device__ void load_rows(unsigned (&to)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ void load_rows(unsigned (&to)[4], const void* row) {
  load_rows(to, shared_address(row));
}

// Four matrices of 8 rows of 16 bytes, of each the transposed: lane i has the address of row i % 8
// of matrix i / 8, and gets the elements [2 * (i % 4)] and [2 * (i % 4) + 1] of column i / 4.
__device__ void load_transposed(unsigned (&to)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// A matrix of 8 rows of 16 bytes, of which lane i has the elements [2 * (i % 4)] and
// [2 * (i % 4) + 1] of row i / 4: those of column i / 4.
__device__ unsigned transpose(unsigned elements) {
  unsigned of_column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_column) : "r"(elements));
  return of_column;
}

// c += a b, of 16 rows, 8 columns and 16 terms.
template <class Type>
__device__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ void multiply_add<BFloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ void multiply_add<Half>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                   unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2 to the power of x.
__device__ float power_of_2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
