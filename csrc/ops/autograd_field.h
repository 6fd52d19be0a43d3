// How an autograd Node keeps one argument of its derivative from the forward to the backward.
//
// What is done to all of them (keeping, releasing, unpacking, handing over to compiled autograd)
// stands here, once for each type. A tensor is kept as a SavedVariable whatever it is for: torch's
// version counter then tells of one that was changed in place, saved-tensor hooks see it, and
// activation checkpoints keep none of it.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <optional>
#include <vector>

namespace cudnn_ops {

template <class Stored>
struct StoredField {
  Stored stored{};

  // Compiled autograd puts its own in place of tensors and symbolic sizes while it traces.
  void before(torch::autograd::SwapSavedVariables& saved) {
    saved.before(stored);
  }
  void after(torch::autograd::SwapSavedVariables& saved) {
    saved.after(stored);
  }
};

// A number, a flag, or an optional one. `Packed` is what it is in a graph of compiled autograd.
template <class T>
struct Field : StoredField<T> {
  using Packed = T;

  void keep(const T& value, const torch::autograd::Node* /*node*/) {
    this->stored = value;
  }
  void release() {
  }
  template <class Owner>
  const T& get(const Owner& /*owner*/) const {
    return this->stored;
  }
  template <class Owner>
  Packed pack(const Owner& /*owner*/) const {
    return this->stored;
  }
  void collect(torch::autograd::CompiledNodeArgs& args) const {
    args.collect(this->stored);
  }
};

// A list of numbers.
template <class T, unsigned size>
struct Field<c10::SmallVector<T, size>> : StoredField<c10::SmallVector<T, size>> {
  using Packed = std::vector<T>;

  void keep(const c10::SmallVector<T, size>& value, const torch::autograd::Node* /*node*/) {
    this->stored = value;
  }
  void release() {
  }
  template <class Owner>
  const c10::SmallVector<T, size>& get(const Owner& /*owner*/) const {
    return this->stored;
  }
  template <class Owner>
  Packed pack(const Owner& /*owner*/) const {
    return {this->stored.begin(), this->stored.end()};
  }
  void collect(torch::autograd::CompiledNodeArgs& args) const {
    args.collect(c10::ArrayRef<T>(this->stored));
  }
};

template <>
struct Field<at::Tensor> : StoredField<torch::autograd::SavedVariable> {
  using Packed = at::Tensor;
  bool is_output = false;  // of the Node that keeps it, which would own itself

  void keep(const at::Tensor& value, const torch::autograd::Node* node) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(value);
    is_output = meta != nullptr && meta->grad_fn_.get() == node;
    stored = torch::autograd::SavedVariable(value, is_output);
  }
  void release() {
    stored.reset_data();
  }
  template <class Owner>
  at::Tensor get(const Owner& owner) const {
    return stored.unpack(is_output ? owner : Owner());
  }
  template <class Owner>
  Packed pack(const Owner& owner) const {
    return get(owner);
  }
  void collect(torch::autograd::CompiledNodeArgs& args) const {
    args.collect(stored, is_output);
  }
};

template <>
struct Field<std::optional<at::Tensor>> : Field<at::Tensor> {
  using Packed = std::optional<at::Tensor>;

  void keep(const std::optional<at::Tensor>& value, const torch::autograd::Node* node) {
    if (value) Field<at::Tensor>::keep(*value, node);
  }
  template <class Owner>
  std::optional<at::Tensor> get(const Owner& owner) const {
    at::Tensor tensor = Field<at::Tensor>::get(owner);
    return tensor.defined() ? std::optional<at::Tensor>(std::move(tensor)) : std::nullopt;
  }
  template <class Owner>
  Packed pack(const Owner& owner) const {
    return get(owner);
  }
};

}  // namespace cudnn_ops
