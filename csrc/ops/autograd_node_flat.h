// While the families move over: Nodes that list what they save one by one.
#pragma once

namespace cudnn_ops {

// A list of numbers.
template <class T>
struct Field<c10::ArrayRef<T>> : StoredField<c10::SmallVector<T, 13>> {
  using Packed = std::vector<T>;

  void keep(c10::ArrayRef<T> value, const torch::autograd::Node* /*node*/) {
    this->stored.assign(value.begin(), value.end());
  }
  void release() {
  }
  template <class Owner>
  c10::ArrayRef<T> get(const Owner& /*owner*/) const {
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

template <const char* name_, auto gradients>
class FlatNode;

template <const char* name_, size_t inputs, class... Args,
          variable_list (*gradients)(const variable_list&, const Wanted<inputs>&, Args...)>
class FlatNode<name_, gradients> final : public torch::autograd::Node {
 public:
  std::string name() const override {
    return name_;
  }

  // After set_history(), which says what is an output of this Node.
  void save(const std::decay_t<Args>&... args) {
    std::apply([&](auto&... field) { (field.keep(args, this), ...); }, fields_);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::apply([](auto&... field) { (field.release(), ...); }, fields_);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (are_undefined(grads)) return variable_list(inputs);
    const auto owner = owner_of(*this);
    return std::apply(
        [&](const auto&... field) { return gradients(grads, wanted(), field.get(owner)...); },
        fields_);
  }

  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    std::apply([&](const auto&... field) { (field.collect(args), ...); }, fields_);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    const auto& compiler = getPyCompilerInterface();
    // Once, as the functions of torch's own Nodes; the types are those that call_packed() unpacks.
    static const std::string function =
        compiler->bind_function(saved.get_py_compiler(), name_, call_packed,
                                {IValuePacker<std::vector<bool>>::packed_type(),
                                 IValuePacker<Packed<Args>>::packed_type()...},
                                /*is_custom_function=*/true);
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
  template <class Arg>
  using Packed = typename Field<std::decay_t<Arg>>::Packed;

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
    // In braces: from left to right.
    const std::tuple<Packed<Args>...> fields{args.unpack<Packed<Args>>()...};
    return std::apply([&](const auto&... field) { return gradients(grads, wanted, field...); },
                      fields);
  }

  std::tuple<Field<std::decay_t<Args>>...> fields_;
};

}  // namespace cudnn_ops
