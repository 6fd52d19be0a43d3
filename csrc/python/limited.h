// Python's headers, held to what every Python from 3.10 on has under the same names.
#pragma once

#define Py_LIMITED_API 0x030A0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static_assert(sizeof(PyObject) == sizeof(Py_ssize_t) + sizeof(void*),
              "the limited API is not for builds of Python without the global lock");
