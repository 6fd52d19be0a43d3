#include "graph/offset_table.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <vector>

namespace cudnn_ops::graph {
namespace {

// Gives the CUDA graph that `stream` is being captured into a copy of `words`, to live as long
// as it does: every replay reads the source of a copied host-to-device transfer again.
const void* copy_for_capture(cudaStream_t stream, c10::ArrayRef<int64_t> words) {
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
#else
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, nullptr, nullptr));
#endif
  auto* copy = new std::vector<int64_t>(words.begin(), words.end());
  cudaUserObject_t owner = nullptr;
  C10_CUDA_CHECK(cudaUserObjectCreate(
      &owner, copy, [](void* object) { delete static_cast<std::vector<int64_t>*>(object); }, 1,
      cudaUserObjectNoDestructorSync));
  C10_CUDA_CHECK(cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove));
  return copy->data();
}

}  // namespace

void upload(c10::ArrayRef<int64_t> words, void* place, bool capturing) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  // From pageable memory: the driver has taken the bytes when the call returns.
  const void* source = capturing ? copy_for_capture(stream, words) : words.data();
  C10_CUDA_CHECK(cudaMemcpyAsync(place, source, words.size() * sizeof(int64_t),
                                 cudaMemcpyHostToDevice, stream));
}

bool OffsetTable::begin_column(bool is_offsets, int64_t value, const void* source) {
  for (const auto& column : columns_) {
    if (column.is_offsets == is_offsets && column.value == value && column.source == source) {
      columns_.push_back(column);
      return false;
    }
  }
  if (words_.size() % 2 != 0) words_.push_back(0);  // 16 bytes
  columns_.push_back({is_offsets, value, words_.size(), source});
  return true;
}

void OffsetTable::add_offsets(int64_t step) {
  if (!begin_column(/*is_offsets=*/true, step)) return;
  for (int64_t i = 0; i <= declared_batch_; ++i) words_.push_back(std::min(i, batch_) * step);
}

void OffsetTable::add_lengths(int64_t length) {
  if (!begin_column(/*is_offsets=*/false, length)) return;
  const auto at = [&](int64_t i) { return i < batch_ ? length : 0; };
  for (int64_t i = 0; i < declared_batch_; i += 2) words_.push_back(at(i) | at(i + 1) << 32);
}

void OffsetTable::add_lengths(const void* lengths) {
  if (!begin_column(/*is_offsets=*/false, 0, lengths)) return;
  words_.resize(words_.size() + static_cast<size_t>(declared_batch_ + 1) / 2);
}

c10::DataPtr OffsetTable::upload(c10::SmallVectorImpl<void*>& pointers, bool capturing) const {
  auto memory = c10::cuda::CUDACachingAllocator::get()->allocate(words_.size() * sizeof(int64_t));
  graph::upload(words_, memory.get(), capturing);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  for (const auto& column : columns_) {
    void* place = static_cast<int64_t*>(memory.get()) + column.start;
    pointers.push_back(place);
    if (column.source != nullptr) {
      C10_CUDA_CHECK(cudaMemcpyAsync(place, column.source, batch_ * sizeof(int32_t),
                                     cudaMemcpyDeviceToDevice, stream));
    }
  }
  return memory;
}

}  // namespace cudnn_ops::graph
