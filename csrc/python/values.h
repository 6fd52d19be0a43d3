// Between Python's objects and the parameters of an operator's function, for calls that need no
// more than a look at each argument's type (fast.cpp). What is no such plain value is left to
// torch.ops: a number of numpy's, a symbolic size, a subclass of Tensor.
//
// Python's limited API alone, so that one file serves every Python.
#pragma once

#include "python/limited.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymInt.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

// Of libtorch_python, whose header asks for all of Python's API.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace cudnn_ops::python {

// Torch's classes, and where in an object of the first two its at::Tensor is.
struct Torch {
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  PyTypeObject* size = nullptr;
  Py_ssize_t offset = 0;
};
inline Torch torch_types;

constexpr unsigned kNumbers = 16;  // of a list that takes no memory of its own

// What holds an argument while the function runs, by the type of the parameter.
template <class Parameter>
struct Slot {
  using type = Parameter;
};
template <class T>
struct Slot<const T&> {
  using type = T;
};
template <class T>
struct Slot<c10::ArrayRef<T>> {
  using type = c10::SmallVector<T, kNumbers>;
};
template <class T>
struct Slot<c10::OptionalArrayRef<T>> {
  using type = std::optional<c10::SmallVector<T, kNumbers>>;
};

template <class Parameter, class Value>
Parameter as_parameter(Value& value) {
  return value;
}
template <class Parameter, class T, unsigned size>
Parameter as_parameter(std::optional<c10::SmallVector<T, size>>& value) {
  return value ? Parameter(c10::ArrayRef<T>(*value)) : Parameter(std::nullopt);
}

// Each says whether `given` is a plain value of the type, and puts it into `value` if so.
inline bool read(PyObject* given, at::Tensor& value) {
  const PyTypeObject* type = Py_TYPE(given);
  if (type != torch_types.tensor && type != torch_types.parameter) return false;
  const char* place = reinterpret_cast<const char*>(given) + torch_types.offset;
  value = *reinterpret_cast<const at::Tensor*>(place);
  return value.defined();
}

inline bool read(PyObject* given, bool& value) {
  value = given == Py_True;
  return value || given == Py_False;
}

inline bool read(PyObject* given, int64_t& value) {
  if (Py_TYPE(given) != &PyLong_Type) return false;
  value = PyLong_AsLongLong(given);
  if (value != -1 || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();  // too large
  return false;
}

inline bool read(PyObject* given, c10::SymInt& value) {
  int64_t number = 0;
  if (!read(given, number)) return false;
  value = number;
  return true;
}

inline bool read(PyObject* given, double& value) {
  if (Py_TYPE(given) == &PyFloat_Type) {
    value = PyFloat_AsDouble(given);
    return true;
  }
  int64_t number = 0;
  if (!read(given, number)) return false;
  value = static_cast<double>(number);
  return true;
}

// The text lives as long as Python's string.
inline bool read(PyObject* given, std::string_view& value) {
  if (Py_TYPE(given) != &PyUnicode_Type) return false;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  value = {text, static_cast<size_t>(size)};
  return true;
}

template <class T>
bool read(PyObject* given, std::optional<T>& value);

template <class T, unsigned size>
bool read(PyObject* given, c10::SmallVector<T, size>& value) {
  const PyTypeObject* type = Py_TYPE(given);
  const bool is_list = type == &PyList_Type;
  if (!is_list && type != &PyTuple_Type && type != torch_types.size) return false;
  const Py_ssize_t count = is_list ? PyList_Size(given) : PyTuple_Size(given);
  value.resize(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* number = is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i);
    if (!read(number, value[static_cast<size_t>(i)])) return false;
  }
  return true;
}

// Which results are wanted.
template <size_t size>
bool read(PyObject* given, std::array<bool, size>& value) {
  const PyTypeObject* type = Py_TYPE(given);
  if (type != &PyList_Type && type != &PyTuple_Type) return false;
  const bool is_list = type == &PyList_Type;
  const Py_ssize_t count = is_list ? PyList_Size(given) : PyTuple_Size(given);
  if (count != static_cast<Py_ssize_t>(size)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* flag = is_list ? PyList_GetItem(given, i) : PyTuple_GetItem(given, i);
    if (!read(flag, value[static_cast<size_t>(i)])) return false;
  }
  return true;
}

template <class T>
bool read(PyObject* given, std::optional<T>& value) {
  value.reset();
  return given == Py_None || read(given, value.emplace());
}

// A list of a new one's: copies of lists share their items.
inline bool read(PyObject* given, c10::List<std::optional<at::Tensor>>& value) {
  c10::SmallVector<std::optional<at::Tensor>, kNumbers> items;
  if (!read(given, items)) return false;
  value = c10::List<std::optional<at::Tensor>>();
  value.reserve(items.size());
  for (auto& item : items) value.push_back(std::move(item));
  return true;
}

// The default of a schema.
template <class T>
void read(const c10::IValue& given, T& value) {
  value = given.to<T>();
}
inline void read(const c10::IValue& given, std::string_view& value) {
  value = given.toStringView();  // of the schema's string
}
template <class T, unsigned size>
void read(const c10::IValue& given, c10::SmallVector<T, size>& value) {
  if constexpr (std::is_constructible_v<T, int64_t>) {  // no list of tensors has a default
    for (const int64_t number : given.toIntVector()) value.push_back(T(number));
  }
}
template <class T, unsigned size>
void read(const c10::IValue& given, std::optional<c10::SmallVector<T, size>>& value) {
  if (!given.isNone()) read(given, value.emplace());
}

// A new reference to what Python gets; null with Python's error set.
inline PyObject* result(at::Tensor&& tensor) {
  return THPVariable_Wrap(std::move(tensor));
}

inline PyObject* result(std::vector<at::Tensor>&& tensors) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
  for (size_t i = 0; list != nullptr && i < tensors.size(); ++i) {
    PyObject* item = result(std::move(tensors[i]));
    if (item == nullptr || PyList_SetItem(list, static_cast<Py_ssize_t>(i), item) != 0) {
      Py_DECREF(list);
      list = nullptr;
    }
  }
  return list;
}

template <class... Tensors>
PyObject* result(std::tuple<Tensors...>&& tensors) {
  PyObject* tuple = PyTuple_New(sizeof...(Tensors));
  Py_ssize_t i = 0;
  const auto put = [&](at::Tensor& tensor) {
    PyObject* item = tuple == nullptr ? nullptr : result(std::move(tensor));
    if (item == nullptr || PyTuple_SetItem(tuple, i++, item) != 0) {
      Py_XDECREF(tuple);
      tuple = nullptr;
    }
  };
  std::apply([&](auto&... tensor) { (put(tensor), ...); }, tensors);
  return tuple;
}

}  // namespace cudnn_ops::python
