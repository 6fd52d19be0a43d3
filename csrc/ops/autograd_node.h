// What every derivative is written with: one template for the autograd Nodes, made of the function
// that computes the gradients and of the struct that it computes them from, in the words of the
// torch that is compiled against.
#pragma once

#include "ops/autograd_field.h"
#include "ops/operator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace cudnn_ops {

// Newer torches count references inside the Node (intrusive_ptr), older ones beside it
// (shared_ptr).
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

using torch::autograd::variable_list;

// Whether the gradient of each input is asked for.
template <size_t inputs>
using Wanted = std::array<bool, inputs>;

// The Node of a derivative. `gradients` computes those of the inputs from those of the outputs, of
// which one at least is defined, and from what was saved: a struct whose fields (operator.h) are
// the only list of that. It runs below in eager mode, and as a node of a graph under compiled
// autograd, with tensors in whatever memory format saved-tensor hooks brought them back.
template <const char* name_, auto gradients>
class BackwardNode;

template <const char* name_, size_t inputs, class Saved,
          variable_list (*gradients)(const variable_list&, const Wanted<inputs>&, const Saved&)>
class BackwardNode<name_, gradients> final : public torch::autograd::Node {
 public:
  std::string name() const override {
    return name_;
  }

  // After set_history(), which says what is an output of this Node.
  void save(const Saved& saved) {
    for_each(fields_, Saved::fields(saved),
             [&](auto& field, const auto& value) { field.keep(value, this); });
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::apply([](auto&... field) { (field.release(), ...); }, fields_);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (are_undefined(grads)) return variable_list(inputs);
    const auto owner = owner_of(*this);
    Saved saved;
    for_each(fields_, Saved::fields(saved),
             [&](const auto& field, auto& value) { value = field.get(owner); });
    return gradients(grads, wanted(), saved);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    std::apply([&](const auto&... field) { (field.collect(args), ...); }, fields_);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    const auto& compiler = getPyCompilerInterface();
    // Once, as the functions of torch's own Nodes; the types are those that call_packed() unpacks.
    static const std::string function = compiler->bind_function(
        saved.get_py_compiler(), name_, call_packed, packed_types(), /*is_custom_function=*/true);
    std::apply([&](auto&... field) { (field.before(saved), ...); }, fields_);
    PackedArgs packed;
    const auto mask = wanted();
    packed.pack(std::vector<bool>(mask.begin(), mask.end()));
    const auto owner = owner_of(*this);
    std::apply([&](const auto&... field) { (packed.pack(field.pack(owner)), ...); }, fields_);
    auto results = compiler->call_function(
        saved.get_py_compiler(), "apply_functional", function, grads, packed.vec(),
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            get_input_metadata(next_edges())));
    std::apply([&](auto&... field) { (field.after(saved), ...); }, fields_);
    return results;
  }

 private:
  template <class Fields>
  struct FieldsToKeep;
  template <class... Members>
  struct FieldsToKeep<std::tuple<Members&...>> {
    using Kept = std::tuple<Field<Members>...>;
    using Packed = std::tuple<typename Field<Members>::Packed...>;
  };
  using Kept = typename FieldsToKeep<FieldsOf<Saved>>::Kept;
  using Packed = typename FieldsToKeep<FieldsOf<Saved>>::Packed;

  // Calls `function` with each of one tuple and its fellow of the other.
  template <class Ones, class Others, class Function>
  static void for_each(Ones&& ones, Others&& others, const Function& function) {
    std::apply(
        [&](auto&... one) {
          std::apply([&](auto&... other) { (function(one, other), ...); }, others);
        },
        ones);
  }

  static std::vector<at::TypePtr> packed_types() {
    using torch::dynamo::autograd::IValuePacker;
    std::vector<at::TypePtr> types{IValuePacker<std::vector<bool>>::packed_type()};
    const auto add = [&](const auto& packed) {
      types.push_back(IValuePacker<std::decay_t<decltype(packed)>>::packed_type());
    };
    std::apply([&](const auto&... packed) { (add(packed), ...); }, Packed());
    return types;
  }

  static bool are_undefined(const variable_list& grads) {
    return std::none_of(grads.begin(), grads.end(),
                        [](const auto& grad) { return grad.defined(); });
  }

  Wanted<inputs> wanted() const {
    Wanted<inputs> result{};
    for (size_t i = 0; i < inputs; ++i) result[i] = task_should_compute_output(i);
    return result;
  }

  // What the node of a graph runs.
  static variable_list call_packed(const variable_list& grads,
                                   const std::vector<c10::IValue>& packed) {
    if (are_undefined(grads)) return variable_list(inputs);
    torch::autograd::PackedArgs args(packed);
    const auto mask = args.unpack<std::vector<bool>>();
    Wanted<inputs> wanted{};
    std::copy_n(mask.begin(), inputs, wanted.begin());
    Saved saved;
    std::apply([&](auto&... value) { (unpack(args, value), ...); }, Saved::fields(saved));
    return gradients(grads, wanted, saved);
  }

  template <class Value>
  static void unpack(torch::autograd::PackedArgs& args, Value& value) {
    value = args.unpack<typename Field<Value>::Packed>();
  }

  Kept fields_;
};

// The gradients that are asked for, out of a tuple of all.
template <size_t inputs, class Gradients>
variable_list only_wanted(const Wanted<inputs>& wanted, const Gradients& gradients) {
  static_assert(std::tuple_size_v<Gradients> == inputs);
  variable_list result(inputs);
  size_t i = 0;
  const auto put = [&](const at::Tensor& gradient) {
    if (wanted[i]) result[i] = gradient;
    ++i;
  };
  std::apply([&](const auto&... gradient) { (put(gradient), ...); }, gradients);
  return result;
}

inline c10::DispatchKeySet below_autograd(c10::DispatchKeySet keys) {
  return keys & c10::after_ADInplaceOrView_keyset;
}

// Whether a derivative will be asked for, and the tensors that it would be of.
template <class Args>
variable_list differentiable_inputs(const Args& args) {
  variable_list inputs;
  if (!at::GradMode::is_enabled()) return inputs;
  const auto add = [&](const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      if (value.defined() && value.requires_grad()) inputs.push_back(value);
    } else if constexpr (std::is_same_v<Value, OptionalTensor>) {
      if (value && value->requires_grad()) inputs.push_back(*value);
    }
  };
  std::apply([&](const auto&... value) { (add(value), ...); }, Args::fields(args));
  return inputs;
}

// Runs the operator without autograd, with arguments as Operator::call_with() takes them.
template <class Result, class Args, class... Given>
Result call_below_autograd(const Operator<Result, Args>& op, c10::DispatchKeySet keys,
                           const Given&... given) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(below_autograd(keys), given...);
}

// Makes a Node the history of `outputs`, with edges to where the gradients go, and lets it save.
template <class Node, class Saved>
void set_derivative(torch::autograd::edge_list&& edges,
                    std::initializer_list<std::reference_wrapper<const at::Tensor>> outputs,
                    const Saved& saved) {
  const auto node = make_node<Node>();
  node->set_next_edges(std::move(edges));
  for (const at::Tensor& output : outputs) torch::autograd::set_history(output, node);
  node->save(saved);
}

// Raises where an argument has a forward-mode gradient, which would be dropped. Without a level of
// forward mode none has, and asking each of them would take longer.
template <class Args>
void refuse_forward_mode(const char* op, const Args& args) {
  if (torch::autograd::ForwardADLevel::try_get_by_idx(0) == nullptr) return;
  const auto refuse = [op](const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, at::Tensor> || std::is_same_v<Value, OptionalTensor>) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !torch::autograd::isFwGradDefined(value), op,
          ": forward-mode derivatives (jvp, jacfwd, hessian) are not available; use reverse mode "
          "(backward, vjp, grad, jacrev)");
    }
  };
  std::apply([&](const auto&... value) { (refuse(value), ...); }, Args::fields(args));
}

// Runs an operator that has no derivative, as backwards have none: its results can be used, but
// asking for a gradient through them raises `message`. `name` is the operator's for users.
template <class Results, class Args>
Results without_derivative(const Operator<Results, Args>& op, c10::DispatchKeySet keys,
                           const Args& args, const char* name, const char* message) {
  refuse_forward_mode(name, args);
  Results results = call_below_autograd(op, keys, args);
  const variable_list inputs = differentiable_inputs(args);
  if (inputs.empty()) return results;
  const auto node =
      make_node<torch::autograd::Error>(message, torch::autograd::collect_next_edges(inputs));
  if constexpr (std::is_same_v<Results, at::Tensor>) {
    torch::autograd::set_history(results, node);
  } else {
    std::apply([&](auto&... tensor) { (torch::autograd::set_history(tensor, node), ...); },
               results);
  }
  return results;
}

}  // namespace cudnn_ops
