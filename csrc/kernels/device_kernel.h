// A CUDA kernel of our own, from machine code that comes with the library, or PTX where there is
// none for the GPU at hand, which the driver compiles at the first call and keeps in its own cache.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace cudnn_ops {

// A compiled source (csrc/cmake/compile_kernels.py), for GPUs of one major compute capability; of
// 0: PTX, for the rest. Of a source there are several, that one last.
struct KernelImage {
  int major;
  const char* data;
};

// Where a table of kernels has those for a type: half, bfloat16, then float.
inline int type_index(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half ? 0 : dtype == c10::ScalarType::BFloat16 ? 1 : 2;
}

class DeviceKernel {
 public:
  // `images` must outlive this. Nothing is loaded before the first launch. `starts_early` says that
  // the kernel waits itself for what comes before it in the stream (griddepcontrol.wait).
  DeviceKernel(const KernelImage* images, const char* name, bool starts_early = false)
      : images_(images), name_(name), starts_early_(starts_early) {
  }

  // On the current device and stream. `arguments` are the addresses of the kernel's parameters,
  // `shared_bytes` the memory that each block gets beside what the kernel declares.
  // Any thread may call this, and the next.
  void launch(int64_t blocks, int rows, int threads, void** arguments, int shared_bytes = 0) const;

  // How many such blocks the current device runs at once.
  int64_t resident_blocks(int threads, int shared_bytes) const;

 private:
  const void* function() const;
  void allow(int shared_bytes) const;

  const KernelImage* images_;
  const char* name_;
  bool starts_early_;
  static constexpr int kMajors = 32;
  // By the major compute capability.
  mutable std::array<std::atomic<const void*>, kMajors> functions_{};
  // The last answer of resident_blocks(): device, arguments and blocks per multiprocessor.
  mutable std::atomic<uint64_t> resident_ = 0;
};

}  // namespace cudnn_ops
