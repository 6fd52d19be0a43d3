"""Loads the operators' shared library, which is for one minor version of torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_PACKAGE = Path(__file__).parent
LIBRARY = _PACKAGE / "libtorch_cudnn_ops.so"

#: Where CMake's ``find_package(cudnn_ops)`` looks; see :data:`cudnn_ops.cmake_prefix_path`.
cmake_prefix_path = str(_PACKAGE / "share" / "cmake")

#: A note in the library (csrc/api.cpp), which stands among its first bytes.
_BUILT_AGAINST = re.compile(rb"built against torch (\d+\.\d+)")


def _built_against() -> str:
    try:
        with LIBRARY.open("rb") as file:
            found = _BUILT_AGAINST.search(file.read(4096))
    except FileNotFoundError:
        raise ImportError(
            f"{LIBRARY} is not there: cudnn_ops has not been built. Run "
            "`pip install --no-build-isolation .` in its source folder, or `make build` to work "
            "in that folder"
        ) from None
    if found is None:
        raise ImportError(f"{LIBRARY} is not whole, or of another version: build it again")
    return found[1].decode()


def load() -> None:
    """Registers ``torch.ops.cudnn_ops``. Needs no GPU, no driver and no libcudnn."""
    built_against = _built_against()
    here = ".".join(torch.__version__.split(".")[:2])
    # Asked before it is loaded, which another torch may end with an undefined symbol.
    if here != built_against:
        raise ImportError(
            f"this cudnn_ops was built for torch {built_against} and this is torch "
            f"{torch.__version__}: install the wheel of cudnn_ops whose version ends in "
            f"+torch{here}, or build it against this torch with `pip install "
            "--no-build-isolation .` in its source folder"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        if "libtorch_cuda" not in str(error):
            raise
        raise ImportError(
            f"this cudnn_ops was built for a torch with CUDA and this one, {torch.__version__}, "
            "has none: install torch with CUDA, or build cudnn_ops against this torch with `pip "
            "install --no-build-isolation .` in its source folder"
        ) from error


load()
