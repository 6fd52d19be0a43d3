"""Runs our kernels on a CPU, thread by thread, where operators launch them.

    with fake_runtime.so loaded (fake_runtime.py, has_memory): Kernels("fp8", "rotary_fp8")

Operators run as on a GPU, from the dispatcher to the launch, on tensors whose memory is the host's;
what they launch is a copy of the kernel that the host's compiler made (cpu_kernels.h). Kernels of
torch's own, such as those that copy and fill, do nothing: tensors are filled by :func:`to_gpu`.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).parent
_KERNELS = _HERE.parents[1] / "csrc" / "kernels"
_CONVERSION = re.compile(r'asm\("([\w.]+) %[^"]*"\s*:\s*"=\w"\((\w+)\)\s*:\s*(.*?)\);')
_SHARED = re.compile(r"extern __shared__ (\w+ \w+)\[\];")
#: What these have in assembly is written for a CPU.
_REPLACED = {
    f"{name}.cuh": f"cpu_{name}.h"
    for name in ("arrivals", "cluster", "grid_barrier", "group_barrier", "mma")
}
_ARGUMENT = re.compile(r"const __grid_constant__ (\w+) (\w+)")


class _Kernel(ctypes.Structure):
    """As in fake_runtime.c."""

    _fields_ = (("image", ctypes.c_void_p), ("name", ctypes.c_char * 128))


_Pointer = ctypes.POINTER(_Kernel)
_OnLaunch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, _Pointer, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p
)
_OnOccupancy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _Pointer, ctypes.c_int, ctypes.c_int)
_OnAllow = ctypes.CFUNCTYPE(None, ctypes.c_int, _Pointer, ctypes.c_int)


def _for_cpu(source: str) -> str:
    """With functions in the place of conversions in assembly; arguments come by their address."""

    def call(found: re.Match[str]) -> str:
        values = ", ".join(re.findall(r"\((\w+)\)", found[3]))
        return f"{found[1].replace('.', '_')}({found[2]}, {values});"

    # More than a block of any kernel has.
    source = _SHARED.sub(r"static \1[1 << 15];", source)
    return _ARGUMENT.sub(r"const \1& \2", _CONVERSION.sub(call, source))


def compile_for_cpu(name: str, folder: Path, *macros: str) -> ctypes.CDLL:
    """A source of ``csrc/kernels`` as a library with its kernels."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    for path in (*_KERNELS.glob("*.cuh"), *_KERNELS.glob("*.h"), _KERNELS / f"{name}.cu"):
        source = _HERE / _REPLACED[path.name] if path.name in _REPLACED else path
        (folder / "kernels" / path.name).write_text(_for_cpu(source.read_text()))
    library = folder / f"{name}{''.join(macros)}.so"
    words = [
        *("g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-fno-strict-aliasing"),
        *("-ffp-contract=off", "-x", "c++", f"-I{folder}", f"-I{folder}/kernels", *macros),
        *("-include", str(_HERE / "cpu_kernels.h"), "-o", str(library)),
    ]
    subprocess.run([*words, str(folder / "kernels" / f"{name}.cu")], check=True)
    return ctypes.CDLL(str(library))


class Kernels:
    """Of some sources, in the place of the GPU's.

    Attributes:
        launched: the names of what was launched.
        first: the index of the source with which looking for a kernel begins, where several
            have kernels of one name.
    """

    def __init__(self, runtime: Path, *names: tuple[str, ...]) -> None:
        self._runtime = ctypes.CDLL(str(runtime))
        folder = Path(tempfile.mkdtemp())
        self._libraries = [
            compile_for_cpu(name, folder / str(index), *macros)
            for index, (name, *macros) in enumerate(names)
        ]
        self.launched: list[str] = []
        self.first = 0
        self._callbacks = (
            _OnLaunch(self._on_launch),
            _OnOccupancy(lambda *_: 2),
            _OnAllow(lambda *_: None),
        )
        self._runtime.fake_callbacks(*self._callbacks)
        # Few processors, so that blocks go round. The second GPU is for what is done before 9.0,
        # and the others for what many blocks do.
        for name, sm_version, processors in (
            (b"NVIDIA H200", 90, 2),
            (b"NVIDIA A100", 80, 2),
            (b"NVIDIA H200", 90, 40),
            (b"NVIDIA H200", 90, 132),
        ):
            self._runtime.fake_device(name, sm_version, processors, 232_448)

    def _on_launch(self, device: int, kernel: Any, numbers: Any, argument: int) -> int:
        name = kernel.contents.name.decode()
        self.launched.append(name)
        for library in (*self._libraries[self.first :], *self._libraries):
            if hasattr(library, name):
                library.run_grid(getattr(library, name), numbers, ctypes.c_void_p(argument))
                return 0
        raise LookupError(f"{name} was not compiled for the CPU")

    def checked(self, checks: Iterable[tuple[object, Callable[[], object]]]) -> str:
        """The report of checks, each with what it is called."""
        wrong = []
        for name, check in checks:
            try:
                check()
            except AssertionError as error:
                wrong.append(f"{name}: {error}")
        return self.report(wrong)

    def report(self, wrong: list[str]) -> str:
        """As JSON: what was launched, how many tensors were written around, what was wrong."""
        overruns = int(self._runtime.fake_overruns())
        launched = sorted(set(self.launched))
        return json.dumps({"launched": launched, "overruns": overruns, "wrong": wrong})


def to_gpu(tensor: Tensor) -> Tensor:
    """A copy in what passes for the memory of a GPU, with the same strides."""
    numbers = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cuda")
    memory = torch.empty(numbers, dtype=tensor.dtype, device="cuda")
    ctypes.memmove(memory.data_ptr(), tensor.data_ptr(), memory.nbytes)
    return memory.as_strided(tensor.shape, tensor.stride())


def from_gpu(tensor: Tensor) -> Tensor:
    """The way back."""
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu")
    numbers = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(numbers, dtype=tensor.dtype)
    ctypes.memmove(memory.data_ptr(), tensor.data_ptr(), memory.nbytes)
    return memory.as_strided(tensor.shape, tensor.stride())


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    numbers = 1 + sum((n - 1) * s for n, s in zip(to.shape, to.stride(), strict=True))
    memory = (ctypes.c_char * (numbers * to.element_size())).from_address(to.data_ptr())
    there = torch.frombuffer(memory, dtype=to.dtype).as_strided(to.shape, to.stride())
    there.copy_(from_gpu(source))
    return to


def copy_on_the_cpu() -> torch.library.Library:
    """Copies between tensors of the GPU, as long as what it returns lives."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("copy_", _copy, "CUDA")
    return library
