#include "graph/plan.h"

#include "graph/cudnn_library.h"
#include "graph/error.h"

#include <algorithm>
#include <array>

namespace cudnn_ops::graph {
namespace {

// A finalized variant pack cannot be changed, so each call makes one and throws it away.
class VariantPack {
 public:
  VariantPack() {
    check(cudnn().create_descriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &descriptor_),
          "cudnnBackendCreateDescriptor");
  }
  VariantPack(const VariantPack&) = delete;
  VariantPack& operator=(const VariantPack&) = delete;
  ~VariantPack() {
    cudnn().destroy_descriptor(descriptor_);
  }
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, size_t count,
           const void* values) {
    check(cudnn().set_attribute(descriptor_, name, type, static_cast<int64_t>(count), values),
          "cudnnBackendSetAttribute");
  }
  cudnnBackendDescriptor_t finalized() {
    check(cudnn().finalize(descriptor_), "cudnnBackendFinalize");
    return descriptor_;
  }

 private:
  cudnnBackendDescriptor_t descriptor_ = nullptr;
};

}  // namespace

void Plan::execute(cudnnHandle_t handle, c10::ArrayRef<void*> user_pointers, void* workspace,
                   bool capturing) const {
  if (user_pointers.size() != user_slots_.size()) {
    throw CudnnError("a plan of " + std::to_string(user_slots_.size()) + " tensors was given " +
                     std::to_string(user_pointers.size()) + " addresses");
  }
  if (capturing || needs_frontend_) {
    // The frontend makes the CUDA graph hold a reference to the plan's code, and runs its own
    // kernels; both are worth its overhead here, and neither is needed otherwise.
    execute_by_frontend(handle, user_pointers, workspace);
    return;
  }
  std::array<void*, kMaxTensors> pointers;  // on the stack: no allocation on the call path
  std::copy(pointers_.begin(), pointers_.end(), pointers.begin());
  for (size_t i = 0; i < user_slots_.size(); ++i) pointers[user_slots_[i]] = user_pointers[i];
  for (const auto& [slot, offset] : workspace_slots_) {
    pointers[slot] = static_cast<char*>(workspace) + offset;
  }
  void* engine_workspace =
      workspace == nullptr ? nullptr : static_cast<char*>(workspace) + frontend_workspace_;

  VariantPack pack;
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &engine_workspace);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, uids_.size(),
           pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, uids_.size(), uids_.data());
  check(cudnn().execute(handle, descriptor_, pack.finalized()), "cudnnBackendExecute");
}

}  // namespace cudnn_ops::graph
