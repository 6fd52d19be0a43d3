"""What the machine code of our kernels says of itself: registers, shared memory, threads."""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

MOST_REGISTERS = 255
"""That a thread can have."""
#: Kinds of entries of ``.nv.info`` sections.
_REGISTERS, _MOST_THREADS = 0x2F, 0x05
_CUDA_MACHINE = 190
_IDENTITY = b"\x7fELF\x02\x01\x01"


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


@dataclass
class KernelFacts:
    registers: int = MOST_REGISTERS
    shared: int = 0
    """Bytes that the kernel declares."""
    most_threads: int = 0
    """Of a block; 0: it does not say."""


@dataclass(frozen=True)
class KernelImage:
    """Machine code for one architecture (89: compute capability 8.9), or PTX."""

    architecture: int
    is_ptx: bool
    kernels: dict[str, KernelFacts]


def _sections(data: bytes) -> list[_Section]:
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    return [
        _Section(*struct.unpack_from("<IIQQQQIIQQ", data, offset + i * size)) for i in range(count)
    ]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def read_cubin(data: bytes) -> KernelImage:
    """Of a whole image."""
    architecture = struct.unpack_from("<I", data, 0x30)[0] >> 8 & 0xFF
    # From 9.0 on what the driver itself takes of every block is counted too.
    reserved = 1024 if architecture >= 90 else 0
    sections = _sections(data)
    names = sections[struct.unpack_from("<H", data, 0x3E)[0]]
    symbols = next(section for section in sections if section.kind == 2)
    symbol_names = sections[symbols.link]
    kernels: dict[str, KernelFacts] = {}
    for section in sections:
        name = _text(data, names.offset + section.name)
        if name.startswith(".text."):
            kernels.setdefault(name.removeprefix(".text."), KernelFacts())
        elif name.startswith(".nv.shared.") and "reserved" not in name:
            facts = kernels.setdefault(name.removeprefix(".nv.shared."), KernelFacts())
            facts.shared = section.size - reserved
        elif name.startswith(".nv.info"):
            at, end = section.offset, section.offset + section.size
            while at < end:
                form, kind, size = struct.unpack_from("<BBH", data, at)
                at += 4
                if form != 4:  # the value stands in the place of the size
                    continue
                if kind == _REGISTERS:
                    symbol, registers = struct.unpack_from("<II", data, at)
                    (start,) = struct.unpack_from("<I", data, symbols.offset + 24 * symbol)
                    of = _text(data, symbol_names.offset + start)
                    kernels.setdefault(of, KernelFacts()).registers = registers
                elif kind == _MOST_THREADS:
                    of = name.removeprefix(".nv.info.")
                    (threads,) = struct.unpack_from("<I", data, at)
                    kernels.setdefault(of, KernelFacts()).most_threads = threads
                at += size
    return KernelImage(architecture, False, kernels)


def _size(data: bytes, start: int) -> int:
    head = data[start : start + 64]
    (offset,) = struct.unpack_from("<Q", head, 0x28)
    entry, count = struct.unpack_from("<HH", head, 0x3A)
    return int(offset + entry * count)


@cache
def images_of_library() -> list[KernelImage]:
    """All machine code that the package's library brings."""
    library = Path(__file__).parents[2] / "cudnn_ops" / "libtorch_cudnn_ops.so"
    data = library.read_bytes()
    images = []
    for match in re.finditer(re.escape(_IDENTITY), data):
        start = match.start()
        if struct.unpack_from("<H", data, start + 0x12)[0] == _CUDA_MACHINE:
            images.append(read_cubin(data[start : start + _size(data, start)]))
    return images


@cache
def image_at(address: int) -> KernelImage:
    """What lies at an address of this process.

    PTX is compiled to no more registers than the threads that it names leave; the shared memory is
    that of the machine code for other GPUs.
    """
    if ctypes.string_at(address, len(_IDENTITY)) == _IDENTITY:
        return read_cubin(ctypes.string_at(address, _size(ctypes.string_at(address, 64), 0)))
    text = ctypes.string_at(address).decode()
    target = re.search(r"^\.target sm_(\d+)", text, re.MULTILINE)
    assert target is not None, "neither machine code nor PTX"
    kernels = {}
    for name, head in re.findall(r"\.visible \.entry (\w+)\([^)]*\)([^{]*)\{", text):
        most = re.search(r"\.maxntid (\d+)", head)
        threads = int(most[1]) if most else 0
        # A thread has a multiple of 8.
        registers = min(MOST_REGISTERS, 65536 // threads // 8 * 8) if threads else MOST_REGISTERS
        shared = max(
            image.kernels[name].shared for image in images_of_library() if name in image.kernels
        )
        kernels[name] = KernelFacts(registers, shared, threads)
    return KernelImage(int(target[1]), True, kernels)
