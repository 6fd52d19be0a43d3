"""Loads the operators' shared library and the Python module beside it."""

from __future__ import annotations

from pathlib import Path

import torch

PACKAGE = Path(__file__).parent

#: Where CMake's ``find_package(cudnn_ops)`` looks; see :data:`cudnn_ops.cmake_prefix_path`.
cmake_prefix_path = str(PACKAGE / "share" / "cmake")


def load() -> None:
    """Registers ``torch.ops.cudnn_ops``. Needs no GPU, no driver and no libcudnn."""
    library = PACKAGE / "libtorch_cudnn_ops.so"
    if not library.exists():
        raise ImportError(
            f"{library} is not there: cudnn_ops has not been built. Run "
            "`pip install --no-build-isolation .` in its source folder, or `make build` to work "
            "in that folder"
        )
    try:
        torch.ops.load_library(str(library))
        from cudnn_ops import _C
    except (ImportError, OSError) as error:
        raise ImportError(
            f"cudnn_ops was built for another Python or torch than this one (torch "
            f"{torch.__version__}); build it again with `pip install --no-build-isolation .`"
        ) from error
    built_against = _C.versions()["torch"]
    if torch.__version__.split("+")[0] != built_against.split("+")[0]:
        raise ImportError(
            f"cudnn_ops was built against torch {built_against}, and this is torch "
            f"{torch.__version__}; build it again with `pip install --no-build-isolation .`"
        )


load()
