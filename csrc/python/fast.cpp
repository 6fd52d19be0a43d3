// Calls of the operators from Python past torch.ops, whose parser of arguments takes longer than
// all that an operator does on the host. One function for each operator in kOperators, made from
// the type of the operator's own function and from its schema; it has the overload of torch.ops
// too, and calls that wherever there may be more to a call than its arguments: modes, tracers,
// transforms, tensors of other classes, values that are not plain ones, mistakes. Public functions
// call some of the operators (cudnn_ops/ops/call.py), and code that inductor generates calls those
// that have kernels, which its graphs are made of (cudnn_ops/ops/inductor.py).
//
// A module of its own, by Python's limited API: the operators' library has no Python in it.

#include "python/values.h"

#include "ops/adaptive_norm/adaptive_norm.h"
#include "ops/attention/attention.h"
#include "ops/attention/dense/sdpa.h"
#include "ops/attention/packed/varlen.h"
#include "ops/attention/paged/paged.h"
#include "ops/batch_norm/batch_norm.h"
#include "ops/batch_norm/fold.h"
#include "ops/conv/conv.h"
#include "ops/conv/conv_transpose.h"
#include "ops/gated/gated.h"
#include "ops/group_norm/group_norm.h"
#include "ops/linear/linear.h"
#include "ops/max_pool/max_pool.h"
#include "ops/moe/moe.h"
#include "ops/norm/norm.h"
#include "ops/rotary/rotary.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace torch {
// Of libtorch_python, as THPVariable_Wrap is.
void translate_exception_to_python(const std::exception_ptr& error);
}  // namespace torch

namespace cudnn_ops::python {
namespace {

// No mode, transform or tracer of this thread wants to see a call: they put keys of their own among
// these, and modes of __torch_function__ onto a stack.
bool is_plain_thread() {
  constexpr auto plain =
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::BackendSelect});
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return (included - plain).empty() && !at::impl::torch_function_mode_enabled();
}

// Other threads run Python meanwhile.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {
  }
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;
  ~WithoutLock() {
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// A call as Python's vectorcall hands it over.
struct Given {
  PyObject* const* values;  // positional ones, then those of `names`
  Py_ssize_t positional;
  PyObject* names;  // a tuple, or null

  Py_ssize_t named() const {
    return names == nullptr ? 0 : PyTuple_Size(names);
  }
};

PyObject* call_through_torch(PyObject* overload, const Given& given) {
  PyObject* args = PyTuple_New(given.positional);
  PyObject* kwargs = given.names == nullptr ? nullptr : PyDict_New();
  bool is_good = args != nullptr && (given.names == nullptr || kwargs != nullptr);
  for (Py_ssize_t i = 0; is_good && i < given.positional; ++i) {
    Py_INCREF(given.values[i]);
    is_good = PyTuple_SetItem(args, i, given.values[i]) == 0;
  }
  for (Py_ssize_t i = 0; is_good && i < given.named(); ++i) {
    PyObject* value = given.values[given.positional + i];
    is_good = PyDict_SetItem(kwargs, PyTuple_GetItem(given.names, i), value) == 0;
  }
  PyObject* result = is_good ? PyObject_Call(overload, args, kwargs) : nullptr;
  Py_XDECREF(args);
  Py_XDECREF(kwargs);
  return result;
}

template <class Result>
constexpr bool is_tuple = false;
template <class... Results>
constexpr bool is_tuple<std::tuple<Results...>> = true;

template <class Function>
class Callable;

template <class Result, class... Parameters>
class Callable<Result(Parameters...)> {
 public:
  // A function of Python's, or null with Python's error set. Both live as long as the process.
  static PyObject* make(const c10::OperatorHandle& handle, PyObject* overload, bool is_first_read) {
    auto* self = new Callable(handle, overload, is_first_read);
    PyObject* capsule = PyCapsule_New(self, nullptr, nullptr);
    return capsule == nullptr ? nullptr : PyCFunction_NewEx(&self->method_, capsule, nullptr);
  }

 private:
  static constexpr size_t kCount = sizeof...(Parameters);
  using Slots = std::tuple<typename Slot<Parameters>::type...>;
  using Objects = std::array<PyObject*, kCount>;

  Callable(const c10::OperatorHandle& handle, PyObject* overload, bool is_first_read)
      : handle_(handle.typed<Result(Parameters...)>()),
        overload_(overload),
        is_first_read_(is_first_read),
        name_(handle.schema().name().substr(handle.schema().name().rfind(':') + 1)) {
    Py_INCREF(overload);
    method_.ml_name = name_.c_str();
    const auto& arguments = handle.schema().arguments();
    for_each_index([&](auto i) {
      const c10::Argument& argument = arguments[i];
      names_[i] = PyUnicode_InternFromString(argument.name().c_str());
      positional_ += argument.kwarg_only() ? 0 : 1;
      if (!argument.default_value()) return true;
      has_default_[i] = true;
      read(*argument.default_value(), std::get<i>(defaults_));
      return true;
    });
  }

  // Until one of them gives false.
  template <class Body>
  static bool for_each_index(const Body& body) {
    return [&]<size_t... i>(std::index_sequence<i...> /*indices*/) {
      return (body(std::integral_constant<size_t, i>()) && ...);
    }(std::index_sequence_for<Parameters...>());
  }

  static PyObject* call(PyObject* capsule, PyObject* const* values, Py_ssize_t positional,
                        PyObject* names) {
    const auto& self = *static_cast<Callable*>(PyCapsule_GetPointer(capsule, nullptr));
    const Given given{values, positional, names};
    Objects objects{};
    Slots slots = self.defaults_;
    if (!is_plain_thread() || !self.put_in_order(given, objects) || !self.fill(objects, slots)) {
      return call_through_torch(self.overload_, given);
    }
    try {
      if constexpr (std::is_void_v<Result>) {
        self.run(slots);
        Py_INCREF(Py_None);
        return Py_None;
      } else if constexpr (is_tuple<Result>) {
        auto results = self.run(slots);
        if (!self.is_first_read_) return result(std::move(results));
        return result(std::tuple(std::move(std::get<0>(results))));
      } else {
        return result(self.run(slots));
      }
    } catch (...) {
      ::torch::translate_exception_to_python(std::current_exception());
      return nullptr;
    }
  }

  // By the places of their parameters.
  bool put_in_order(const Given& given, Objects& objects) const {
    if (given.positional > positional_) return false;
    std::copy_n(given.values, given.positional, objects.begin());
    const Py_ssize_t named = given.named();
    size_t place = static_cast<size_t>(given.positional);
    for (Py_ssize_t i = 0; i < named; ++i) {
      place = place_of(PyTuple_GetItem(given.names, i), place);
      if (place == kCount || objects[place] != nullptr) return false;
      objects[place] = given.values[given.positional + i];
    }
    return true;
  }

  // kCount where there is none. Names in the schema's order are found at once behind the one
  // before, and as the same object, for Python's compiler interns them.
  size_t place_of(PyObject* name, size_t next) const {
    auto found = std::find(names_.begin() + next, names_.end(), name);
    if (found == names_.end()) found = std::find(names_.begin(), names_.end(), name);
    if (found == names_.end()) {
      found = std::find_if(names_.begin(), names_.end(),
                           [name](PyObject* other) { return PyUnicode_Compare(name, other) == 0; });
    }
    return static_cast<size_t>(found - names_.begin());
  }

  bool fill(const Objects& objects, Slots& slots) const {
    return for_each_index([&](auto i) {
      return objects[i] == nullptr ? has_default_[i] : read(objects[i], std::get<i>(slots));
    });
  }

  Result run(Slots& slots) const {
    const WithoutLock without_lock;
    return std::apply(
        [&](auto&... slot) { return handle_.call(as_parameter<Parameters>(slot)...); }, slots);
  }

  c10::TypedOperatorHandle<Result(Parameters...)> handle_;
  PyObject* overload_;
  bool is_first_read_;  // of several results, so that Python needs no objects for the others
  std::string name_;
  Objects names_{};
  Py_ssize_t positional_ = 0;
  std::bitset<kCount> has_default_;
  Slots defaults_;
  PyMethodDef method_{nullptr, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                      METH_FASTCALL | METH_KEYWORDS, nullptr};
};

// Operators whose arguments are the fields of a struct, and those that have a function.
template <class Result, class Args>
using OfFields = typename Unpacked<Args>::template Function<Result>;

struct FastOperator {
  std::string_view name, overload;
  PyObject* (*make)(const c10::OperatorHandle& handle, PyObject* overload, bool is_first_read);
};

constexpr FastOperator kOperators[] = {
    {"_adaptive_norm", "", Callable<OfFields<AdaptiveNormResults, AdaptiveNormForward>>::make},
    {"_adaptive_norm_backward", "",
     Callable<OfFields<AdaptiveNormGradients, AdaptiveNormBackward>>::make},
    {"_attention_rng_state", "", Callable<OfFields<at::Tensor, RngState>>::make},
    {"_batch_norm_backward", "", Callable<OfFields<BatchNormGradients, BatchNormBackward>>::make},
    {"_batch_norm_inference", "", Callable<OfFields<at::Tensor, BatchNorm>>::make},
    {"_batch_norm_training", "", Callable<OfFields<BatchNormResults, BatchNorm>>::make},
    {"_conv", "", Callable<OfFields<ConvResults, ConvForward>>::make},
    {"_conv1d", "", Callable<decltype(packed_conv<1>)>::make},
    {"_conv2d", "", Callable<decltype(packed_conv<2>)>::make},
    {"_conv3d", "", Callable<decltype(packed_conv<3>)>::make},
    {"_conv_backward", "", Callable<OfFields<ConvGradients, ConvMaskedBackward>>::make},
    {"_conv_transpose1d", "", Callable<decltype(packed_conv_transpose<1>)>::make},
    {"_conv_transpose2d", "", Callable<decltype(packed_conv_transpose<2>)>::make},
    {"_conv_transpose3d", "", Callable<decltype(packed_conv_transpose<3>)>::make},
    {"_fold_batch_norms", "", Callable<FoldBatchNorms>::make},
    {"_gated", "", Callable<OfFields<at::Tensor, Gated>>::make},
    {"_gated_", "", Callable<OfFields<void, Gated>>::make},
    {"_gated_backward", "", Callable<OfFields<GatedGradients, GatedBackward>>::make},
    {"_group_norm", "", Callable<OfFields<GroupNormResults, GroupNormForward>>::make},
    {"_group_norm_backward", "", Callable<OfFields<GroupNormGradients, GroupNormBackward>>::make},
    {"_grouped_linear", "", Callable<OfFields<at::Tensor, GroupedLinear>>::make},
    {"_grouped_linear_backward", "", Callable<OfFields<MoeGradients, GroupedLinearBackward>>::make},
    {"_linear", "", Callable<OfFields<LinearResults, LinearForward>>::make},
    {"_linear_backward", "", Callable<OfFields<LinearGradients, LinearMaskedBackward>>::make},
    {"_max_pool2d", "", Callable<OfFields<MaxPoolResults, MaxPoolForward>>::make},
    {"_max_pool2d_backward", "", Callable<OfFields<at::Tensor, MaxPoolBackward>>::make},
    {"_mlp", "", Callable<OfFields<MlpResults, MlpForward>>::make},
    {"_mlp_backward", "", Callable<OfFields<MlpGradients, MlpMaskedBackward>>::make},
    {"_moe_combine", "", Callable<OfFields<at::Tensor, MoeCombine>>::make},
    {"_moe_combine_backward", "", Callable<OfFields<MoeGradients, MoeCombineBackward>>::make},
    {"_moe_permute", "", Callable<OfFields<MoePermuted, MoePermute>>::make},
    {"_norm", "", Callable<OfFields<NormResults, NormForward>>::make},
    {"_norm_backward", "", Callable<OfFields<NormGradients, NormBackward>>::make},
    {"_rotary", "", Callable<OfFields<RotaryResults, Rotary>>::make},
    {"_sdpa_backward", "", Callable<OfFields<Gradients, SdpaBackward>>::make},
    {"_varlen_backward", "", Callable<OfFields<VarlenGradients, VarlenBackward>>::make},
    {"adaptive_layer_norm", "", Callable<decltype(adaptive_layer_norm)>::make},
    {"adaptive_rms_norm", "", Callable<decltype(adaptive_rms_norm)>::make},
    {"add_group_norm", "", Callable<decltype(add_group_norm)>::make},
    {"add_layer_norm", "", Callable<decltype(add_layer_norm)>::make},
    {"add_rms_norm", "", Callable<decltype(add_rms_norm)>::make},
    {"batch_norm", "", Callable<decltype(batch_norm)>::make},
    {"gate_add_adaptive_layer_norm", "", Callable<decltype(gate_add_adaptive_layer_norm)>::make},
    {"gate_add_adaptive_rms_norm", "", Callable<decltype(gate_add_adaptive_rms_norm)>::make},
    {"geglu", "", Callable<decltype(geglu)>::make},
    {"group_norm", "", Callable<decltype(group_norm)>::make},
    {"layer_norm", "", Callable<decltype(layer_norm)>::make},
    {"linear", "", Callable<decltype(linear)>::make},
    {"max_pool2d", "", Callable<decltype(max_pool2d)>::make},
    {"mlp", "", Callable<decltype(mlp)>::make},
    {"paged_attention", "", Callable<OfFields<at::Tensor, Paged>>::make},
    {"paged_attention_with_lse", "", Callable<OfFields<OutAndLse, Paged>>::make},
    {"paged_kv_append_", "", Callable<OfFields<void, PagedAppend>>::make},
    {"rms_norm", "", Callable<decltype(rms_norm)>::make},
    {"rotary_embedding", "", Callable<decltype(rotary)>::make},
    {"rotary_embedding", "options", Callable<decltype(rotary_with_options)>::make},
    {"rotary_embedding_qk", "", Callable<decltype(rotary_qk)>::make},
    {"sdpa", "", Callable<OfFields<at::Tensor, Sdpa>>::make},
    {"sdpa_with_lse", "", Callable<OfFields<OutAndLse, Sdpa>>::make},
    {"swiglu", "", Callable<decltype(swiglu)>::make},
    {"varlen_attention", "", Callable<OfFields<at::Tensor, Varlen>>::make},
    {"varlen_attention_with_lse", "", Callable<OfFields<OutAndLse, Varlen>>::make},
};

// callable(name, overload_name, overload, is_first_read=False): what calls that overload of
// torch.ops.
PyObject* callable(PyObject* /*module*/, PyObject* args) {
  const char *name = nullptr, *overload_name = nullptr;
  PyObject* overload = nullptr;
  int is_first_read = 0;
  if (!PyArg_ParseTuple(args, "ssO|p", &name, &overload_name, &overload, &is_first_read)) {
    return nullptr;
  }
  for (const auto& op : kOperators) {
    if (op.name != name || op.overload != overload_name) continue;
    try {
      const std::string full = std::string("cudnn_ops::") + name;
      const auto handle =
          c10::Dispatcher::singleton().findSchemaOrThrow(full.c_str(), overload_name);
      return op.make(handle, overload, is_first_read != 0);
    } catch (...) {
      ::torch::translate_exception_to_python(std::current_exception());
      return nullptr;
    }
  }
  PyErr_Format(PyExc_LookupError, "no fast calls of %s.%s", name, overload_name);
  return nullptr;
}

PyTypeObject* class_of(PyObject* module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(module, name));
}

// Where an object has the pointer that its _cdata is; 0 with Python's error set where it has none.
Py_ssize_t find_tensor(PyTypeObject* type) {
  auto* object = PyObject_CallFunction(reinterpret_cast<PyObject*>(type), nullptr);
  auto* number = object == nullptr ? nullptr : PyObject_GetAttrString(object, "_cdata");
  auto* size = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__basicsize__");
  Py_ssize_t found = 0;
  if (number != nullptr && size != nullptr) {
    const void* tensor = PyLong_AsVoidPtr(number);
    const Py_ssize_t end = PyLong_AsSsize_t(size);
    constexpr Py_ssize_t step = sizeof(void*);
    for (Py_ssize_t at = sizeof(PyObject); found == 0 && at + step <= end; at += step) {
      const char* place = reinterpret_cast<const char*>(object) + at;
      if (*reinterpret_cast<void* const*>(place) == tensor) found = at;
    }
  }
  Py_XDECREF(size);
  Py_XDECREF(number);
  Py_XDECREF(object);
  if (found == 0 && PyErr_Occurred() == nullptr) {
    PyErr_SetString(PyExc_ImportError, "torch keeps its tensors elsewhere than it did");
  }
  return found;
}

// False with Python's error set.
bool find_torch() {
  PyObject* torch = PyImport_ImportModule("torch");
  PyObject* nn = PyImport_ImportModule("torch.nn");
  if (torch == nullptr || nn == nullptr) return false;
  Torch types{class_of(torch, "Tensor"), class_of(nn, "Parameter"), class_of(torch, "Size")};
  Py_DECREF(torch);
  Py_DECREF(nn);
  if (types.tensor == nullptr || types.parameter == nullptr || types.size == nullptr) return false;
  types.offset = find_tensor(types.tensor);
  if (types.offset == 0) return false;
  if (find_tensor(types.parameter) != types.offset) {
    PyErr_SetString(PyExc_ImportError, "torch keeps the tensor of a parameter elsewhere");
    return false;
  }
  torch_types = types;
  return true;
}

PyMethodDef methods[] = {{"callable", callable, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module{
    PyModuleDef_HEAD_INIT, "_fast", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace cudnn_ops::python

PyMODINIT_FUNC PyInit__fast() {
  return cudnn_ops::python::find_torch() ? PyModule_Create(&cudnn_ops::python::module) : nullptr;
}
