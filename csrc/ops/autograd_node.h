// What every derivative is written with. Making an autograd Node, in the words of the torch that is
// compiled against: newer ones count references inside the Node (intrusive_ptr), older ones beside
// it (shared_ptr).
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <functional>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>

namespace cudnn_ops {

template <class Node>
constexpr bool is_intrusive = std::is_base_of_v<c10::intrusive_ptr_target, Node>;

template <class Node, class... Args>
auto make_node(Args&&... args) {
  if constexpr (is_intrusive<Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    // deleteNode frees long chains of Nodes without recursing.
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...),
                                 [](Node* node) { deleteNode(node); });
  }
}

// The owning pointer of a Node that is running, for unpacking what it saved of its own outputs.
template <class Node>
auto owner_of(Node& node) {
  if constexpr (is_intrusive<Node>) {
    return c10::intrusive_ptr<torch::autograd::Node>::unsafe_reclaim_from_nonowning(&node);
  } else {
    return node.shared_from_this();
  }
}

inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}

inline void refuse_forward_mode(
    const char* op, std::initializer_list<std::reference_wrapper<const at::Tensor>> inputs) {
  for (const at::Tensor& input : inputs) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !torch::autograd::isFwGradDefined(input), op,
        " has no forward-mode derivative (jvp); use reverse mode (backward, vjp, grad)");
  }
}

}  // namespace cudnn_ops
