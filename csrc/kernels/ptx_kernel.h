// A CUDA kernel of our own, from PTX that comes with the library: the driver compiles it for the
// GPU at hand, once, and keeps the result in its own cache.
#pragma once

#include <cstdint>

namespace cudnn_ops {

class PtxKernel {
 public:
  // `ptx` must outlive this. Nothing is loaded before the first launch.
  PtxKernel(const char* ptx, const char* name) : ptx_(ptx), name_(name) {
  }

  // On the current device and stream. `arguments` are the addresses of the kernel's parameters,
  // `shared_bytes` the memory that each block gets beside what the kernel declares.
  // Any thread may call this.
  void launch(int64_t blocks, int rows, int threads, void** arguments,
              int shared_bytes = 0) const;

 private:
  const void* function() const;

  const char* ptx_;
  const char* name_;
  mutable const void* function_ = nullptr;
};

}  // namespace cudnn_ops
