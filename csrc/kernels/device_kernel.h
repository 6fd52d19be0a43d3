// A CUDA kernel of our own: machine code that comes with the library, or for other GPUs PTX, which
// the driver compiles at the first call and keeps in its own cache. And the limits of the GPU that
// its launch depends on.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace cudnn_ops {

// A compiled source (csrc/cmake/compile_kernels.py), for GPUs of one major compute capability, or
// 0: PTX, for all others. A source has several images; PTX is the last one.
struct KernelImage {
  int major;
  const char* data;
};

// For counts of blocks.
inline int64_t divide_up(int64_t number, int64_t by) {
  return (number + by - 1) / by;
}

// The index of a type in tables of kernels: half, bfloat16, float.
inline int type_index(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half ? 0 : dtype == c10::ScalarType::BFloat16 ? 1 : 2;
}

struct DeviceLimits {
  int sm_version;        // major * 10 + minor
  int64_t processors;    // multiprocessors
  int64_t shared_bytes;  // the most shared memory that a block can ask for
};

// Of the current device. Any thread may call this, and the next.
DeviceLimits current_limits();

// For tests, which run what GPUs with less shared memory do: the most that current_limits() gives;
// 0: what the GPU has.
void limit_shared_memory(int64_t bytes);

class DeviceKernel {
 public:
  // `images` must outlive this. Nothing is loaded before the first launch. `starts_early`: the
  // kernel waits by itself for those before it in the stream (griddepcontrol.wait).
  // `is_cooperative`: its blocks wait for each other (grid_barrier.cuh), so that all of them must
  // run at once.
  DeviceKernel(const KernelImage* images, const char* name, bool starts_early = false,
               bool is_cooperative = false)
      : images_(images), name_(name), starts_early_(starts_early), is_cooperative_(is_cooperative) {
  }

  // On the current device and stream. `arguments` are the addresses of the kernel's parameters;
  // each block gets `shared_bytes` in addition to what the kernel declares. Of more than one block
  // to a `cluster` there are clusters, for which the GPU must be of compute capability 9.0 or
  // newer. Any thread may call this, and the next.
  void launch(int64_t blocks, int rows, int threads, void** arguments, int shared_bytes = 0,
              int cluster = 1) const;

  // How many such blocks the current device runs at the same time.
  int64_t resident_blocks(int threads, int shared_bytes) const;

  // How many clusters it does, of up to kMostCluster of them, as every GPU with clusters has: fewer
  // than there would be room for, as the blocks of one are near each other.
  static constexpr int kMostCluster = 8;
  int64_t resident_clusters(int threads, int shared_bytes, int cluster) const;

 private:
  const void* function() const;
  void allow(int shared_bytes) const;

  const KernelImage* images_;
  const char* name_;
  bool starts_early_, is_cooperative_;
  static constexpr int kMajors = 32;
  // Indexed by the major compute capability.
  mutable std::array<std::atomic<const void*>, kMajors> functions_{};
  // What allow() asked for last: device and bytes.
  mutable std::atomic<uint64_t> allowed_ = 0;
  // The last answer of resident_blocks(): device, arguments and blocks per multiprocessor.
  mutable std::atomic<uint64_t> resident_ = 0;
  // And of resident_clusters(), for each size of a cluster.
  mutable std::array<std::atomic<uint64_t>, kMostCluster + 1> resident_clusters_{};
};

}  // namespace cudnn_ops
