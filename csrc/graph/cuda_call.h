// What every operator's CUDA kernel does around a plan: find or make it, get workspace from torch's
// allocator, execute. Needs a CUDA build of torch.
#pragma once

#include "graph/plan.h"
#include "graph/plan_key.h"
#include "graph/target.h"

#include <c10/util/ArrayRef.h>

#include <memory>
#include <optional>

namespace cudnn_ops::graph {

// Raises NotImplementedError unless device `index` is of compute capability 8.0 or newer.
void require_sm80(const char* op, int index);

// This thread's cuDNN handle, on the current stream, in a thread that has the current device's
// context.
cudnnHandle_t thread_handle();

// The current device, with this thread's handle.
Target live_target();

// Whether the current stream is being captured into a CUDA graph.
bool is_capturing();

// A call of an operator, in terms of its plan.
struct Call {
  // One of the addresses that the plan writes to.
  struct Written {
    size_t index;
    size_t bytes;
  };
  const char* op;                 // for messages
  const char* advice;             // what to do when cuDNN refuses
  c10::ArrayRef<void*> pointers;  // as Plan::execute expects them
  // All that the plan writes, so that engines are timed on other memory. Empty for a polymorphic
  // plan, whose engine cuDNN chooses: the best for these lengths may be the worst for others.
  c10::ArrayRef<Written> written;
  bool wants_autotune = false;  // whatever the policy says
};

using PlanPtr = std::shared_ptr<const Plan>;

// The exact plan that the cache holds for `key`; null when it holds none, or when the policy
// prefers polymorphic plans. A call with a cached plan costs no more than this and execute().
PlanPtr ready_plan(const PlanKey& key);

// Whether a call without a ready plan runs on its family's polymorphic plan, on which it loses
// `lost` seconds of the GPU's time: as PlanPolicy says, and at the family's first call if the cache
// has that plan, or the store or a bundle has it and none has the exact one. While a CUDA graph is
// captured: whether the cache has it. An exact plan that time has made due is made in the
// background meanwhile; nothing in place of `lost` says that the shape is to keep its plan.
bool takes_polymorphic(const PlanKey& exact, const PlanKey& polymorphic, const PlanKey& family,
                       std::optional<double> lost);

// Has the plan of `key`, whose device is live, made in the background (background_plans.h).
void make_in_background(const PlanKey& key);

// The polymorphic plan, found or made; null when cuDNN refuses it. It then does so for the whole
// family, whose calls need exact plans.
PlanPtr polymorphic_plan(const Call& call, const PlanKey& polymorphic, const PlanKey& family);

// The plan of `key`, found or made. What cuDNN refuses becomes a NotImplementedError with
// cuDNN's reason and `call.advice`.
PlanPtr get_plan(const Call& call, const PlanKey& key);

// The same; null where cuDNN refuses.
PlanPtr plan_or_null(const Call& call, const PlanKey& key);

// For calls that another kernel can run as well: the exact plan of a shape that is called often,
// under kExact of any, found or made; null until then, while it is made in the background, under
// kPolymorphic, and where cuDNN refuses.
PlanPtr often_called_plan(const Call& call, const PlanKey& key);
// Whether that has one, or makes one at the next call; counts a call, as that does.
// `wants_autotune` as the call will have it.
bool is_called_often(const PlanKey& key, bool wants_autotune = false);

// Runs `plan` on the current device and stream.
void execute(const Call& call, const Plan& plan);

}  // namespace cudnn_ops::graph
