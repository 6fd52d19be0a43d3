"""CUDA sources of ours as libraries for this machine's processor, and their arguments' structs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_KERNELS = _HERE.parents[1] / "csrc" / "kernels"
_SCALARS = {"int": ctypes.c_int, "unsigned": ctypes.c_uint, "float": ctypes.c_float}
_SCALARS |= {"long long": ctypes.c_longlong, "bool": ctypes.c_bool}


def _end_of(text: str, start: int) -> int:
    """Behind the parenthesis that closes what was opened before ``start``."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[start], 0)
        start += 1
    return start


def _call_for(statement: str) -> str:
    """What stands in ``asm("op %0, %1;" : "=r"(a) : "r"(b));`` as ``ptx::op(a, b);``."""
    text = "".join(re.findall(r'"([^"]*)"', re.match(r'(\s*"[^"]*")+', statement)[0]))  # type: ignore
    if not text:  # for the compiler alone
        return ""
    values = []
    for match in re.finditer(r'"[=+]?[a-z]"\s*\(', statement):
        values.append(statement[match.end() : _end_of(statement, match.end()) - 1])
    opcode = re.sub(r"\W", "_", text.split()[0].rstrip(";"))
    order = re.findall(r"%(\d+)|(?<=, )(\d+)(?=[,;])", text)
    arguments = ", ".join(values[int(place)] if place else number for place, number in order)
    return f"ptx::{opcode}({arguments});"


def as_cpp(source: str) -> str:
    """CUDA that g++ compiles behind gpu.h."""
    parts, at = [], 0
    for match in re.finditer(r"\basm\s*(?:volatile)?\s*\(", source):
        end = _end_of(source, match.end())
        parts += [source[at : match.start()], _call_for(source[match.end() : end - 1])]
        at = end + 1  # behind the semicolon
    parts.append(source[at:])
    return re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"\1* \2 = (\1*)emulated::shared_memory();",
        "".join(parts),
    )


@cache
def library_of(folder: Path, name: str, calls: tuple[str, ...], *macros: str) -> ctypes.CDLL:
    """``csrc/kernels/<name>.cu`` compiled, with ``launch_<struct>`` for each of ``calls``."""
    folder = folder / re.sub(r"\W", "_", " ".join((name, *macros)))
    folder.mkdir()
    for path in (*_KERNELS.glob("*.cuh"), *_KERNELS.glob("*.h")):
        (folder / path.name).write_text(as_cpp(path.read_text()))
    launchers = "".join(
        f'extern "C" void launch_{call}(void (*kernel)(const {call}), const {call}* call, '
        "unsigned blocks, unsigned rows, unsigned threads, size_t shared, unsigned seed, "
        "unsigned cluster) {\n"
        "  emulated::launch(kernel, *call, blocks, rows, threads, shared, seed, cluster);\n}\n"
        for call in calls
    )
    source = folder / f"{name}.cpp"
    source.write_text(
        '#include "gpu.h"\n' + as_cpp((_KERNELS / f"{name}.cu").read_text()) + launchers
    )
    library = folder / f"{name}.so"
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{_HERE}", *macros]
    done = subprocess.run(
        ["g++", *options, str(source), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@cache
def structs_of(header: str) -> dict[str, type[ctypes.Structure]]:
    """The structs that a header for both sides declares."""
    text = re.sub(r"//.*", "", (_KERNELS / header).read_text())
    found: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            words = re.match(r"(?:const )?(long long|\w+)\s*(.*)", declaration, re.DOTALL)
            assert words is not None, declaration
            for member in (part.strip() for part in words[2].split(",")):
                kind = _SCALARS.get(words[1]) or found.get(words[1])
                pointer = member.startswith("*") or kind is None
                fields.append((member.lstrip("* "), ctypes.c_void_p if pointer else kind))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def launch(
    library: ctypes.CDLL,
    kernel: str,
    call: ctypes.Structure,
    grid: tuple[int, int],
    threads: int,
    shared: int = 0,
    seed: int = 0,
    cluster: int = 1,
) -> None:
    """Runs a kernel, its blocks, or clusters of so many, in an order that the seed says."""
    run = library[f"launch_{type(call).__name__}"]
    run.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_uint] * 3 + [ctypes.c_size_t]
    run.argtypes += [ctypes.c_uint] * 2
    run.restype = None
    run(library[kernel], ctypes.addressof(call), *grid, threads, shared, seed, cluster)
