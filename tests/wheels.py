"""Holds a wheel's libraries to what its name claims, for any processor's.

    python -m tests.wheels dist/*.whl

auditwheel proves the same of what the machine that it runs on can run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: The newest symbols that manylinux_2_28 has.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
#: Of the names that wheels have for processors, readelf's.
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}
#: By name, what may be loaded: manylinux_2_28's, and torch's beside this package.
LIBRARIES = re.compile(
    r"lib(c|dl|gcc_s|m|pthread|stdc\+\+)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
    r"|lib(c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python)\.so"
)
OPERATORS = "libtorch_cudnn_ops.so"
BINDING = "_fast.abi3.so"
#: What the binding may use of Python: of the limited API, as it was in 3.10.
PYTHON = {
    *("PyCMethod_New", "PyCapsule_GetPointer", "PyCapsule_New", "PyDict_New", "PyDict_SetItem"),
    *("PyErr_Clear", "PyErr_Format", "PyErr_Occurred", "PyErr_SetString", "PyEval_RestoreThread"),
    *("PyEval_SaveThread", "PyExc_ImportError", "PyExc_LookupError", "PyFloat_AsDouble"),
    *("PyFloat_Type", "PyImport_ImportModule", "PyList_GetItem", "PyList_New"),
    *("PyList_SetItem", "PyList_Size", "PyList_Type"),
    *("PyLong_AsLongLong", "PyLong_AsSsize_t", "PyLong_AsVoidPtr", "PyLong_Type"),
    *("PyModule_Create2", "PyObject_Call", "PyObject_GetAttrString", "PyTuple_GetItem"),
    *("PyTuple_New", "PyTuple_SetItem", "PyTuple_Size", "PyTuple_Type", "PyUnicode_AsUTF8AndSize"),
    *("PyUnicode_Compare", "PyUnicode_InternFromString", "PyUnicode_Type"),
    *("_PyArg_ParseTuple_SizeT", "_PyObject_CallFunction_SizeT", "_Py_Dealloc", "_Py_FalseStruct"),
    *("_Py_NoneStruct", "_Py_TrueStruct"),
}


def readelf(library: Path, *options: str) -> str:
    words = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def symbol_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version of each family of symbols that a library needs of the system."""
    text = readelf(library, "--version-info")
    newest: dict[str, tuple[int, ...]] = {}
    for family, numbers in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text):
        version = tuple(map(int, numbers.split(".")))
        newest[family] = max(version, newest.get(family, ()))
    return newest


def python_symbols(library: Path) -> set[str]:
    """What a library wants to find in a Python."""
    return set(re.findall(r"UND (_?Py\w+)", readelf(library, "--dyn-syms")))


def defects(library: Path, machine: str) -> list[str]:
    """What contradicts a wheel for manylinux_2_28 and this machine, a sentence each."""
    found = []
    (built_for,) = re.findall(r"Machine: +(.*)", readelf(library, "--file-header"))
    if built_for != MACHINES[machine]:
        found.append(f"it is for {built_for}")
    for family, version in symbol_versions(library).items():
        if version > NEWEST[family]:
            found.append(f"it needs {family}_{'.'.join(map(str, version))}")
    dynamic = readelf(library, "--dynamic")
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if not LIBRARIES.fullmatch(name):
            found.append(f"it loads {name}")
    paths = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic)
    beside_torch = library.name in (OPERATORS, BINDING)
    if paths != (["$ORIGIN/../torch/lib"] if beside_torch else []):
        found.append(f"its run path is {':'.join(paths)}")
    found += [f"it uses {name} of Python" for name in sorted(python_symbols(library) - PYTHON)]
    return [f"{library.name}: {text}" for text in found]


def check(wheel: Path) -> list[str]:
    """The defects of all libraries of a wheel, and of the wheel."""
    (machine,) = re.findall(r"linux_(?:\d+_\d+_)?(\w+)\.whl$", wheel.name)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        libraries = sorted(Path(folder).rglob("*.so*"))
        names = [library.name for library in libraries]
        # The binding is left out where Python's headers are not those of the machine.
        if names not in ([BINDING, OPERATORS, "libcuda.so.1"], [OPERATORS, "libcuda.so.1"]):
            return [f"its libraries are {', '.join(names)}"]
        return [defect for library in libraries for defect in defects(library, machine)]


def main() -> int:
    found = [f"{wheel}: {defect}" for wheel in sys.argv[1:] for defect in check(Path(wheel))]
    print(*(found or ["every library is what its wheel claims"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
