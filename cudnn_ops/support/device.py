"""The GPUs that questions can be about: live ones, and those that a file describes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

import torch

from cudnn_ops import _C

_FOLDER = Path(__file__).parent / "devices"
_STUB = Path(__file__).parent.parent / "stub" / "libcuda.so.1"


def devices() -> list[str]:
    """Names of the GPUs whose descriptions come with the package.

    Example:
        >>> from cudnn_ops import support
        >>> "h200" in support.devices()
        True
    """
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def describe_device(index: int = 0) -> str:
    """The description of live GPU ``index``: JSON text, for ``explain(device=...)`` anywhere."""
    prepare("current")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"index must be one of torch's {count} GPUs, counted from 0, got {index}")
    return _C.describe_device(index)


def format_cudnn_version(version: int) -> str:
    """``91900`` as ``"9.19.0"``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _description(device: str | Path) -> str:
    if device == "current":
        return "current"
    name = re.sub(r"[ _-]+", "_", str(device).strip().lower()).removeprefix("nvidia_")
    if name in devices():
        return (_FOLDER / f"{name}.json").read_text()
    path = Path(device)
    if path.is_file():
        try:
            return path.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not the description of a GPU: {error}") from error
    raise ValueError(
        f'device {str(device)!r} is not "current", not one of {", ".join(devices())}, and not a '
        "file; `python -m cudnn_ops describe-device` writes one on a machine with a GPU"
    )


def prepare(device: str | Path) -> str:
    """Makes sure that cuDNN finds a driver, real or stub, and the compiler that it needs.

    Returns the device's name for C++: "current", or its description.
    """
    description = _description(device)
    if description != "current":
        _load_driver_stub()
        offer_wheels()
    elif not torch.cuda.is_available():
        raise RuntimeError(
            'device="current" asks for a GPU, and torch sees none; describe one instead, '
            f"such as device={devices()[0]!r}"
        )
    return description


@functools.cache
def _load_driver_stub() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Global, so that cuDNN's own lookup by this name finds it; it stays loaded.
        ctypes.CDLL(str(_STUB), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def offer_wheels() -> None:
    """Loads cuDNN and its compiler from their own wheels if torch has no CUDA."""
    if torch.version.cuda is not None:
        return
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            for library in sorted(Path(root).glob(f"cu1*/lib/{name}")):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        cudnn = Path(root) / "cudnn" / "lib" / "libcudnn.so.9"
        if cudnn.is_file():
            _C.set_cudnn_fallback_path(str(cudnn))


def sm_version(description: str) -> int:
    """The compute capability of a device as :func:`prepare` calls it: 90 for 9.0."""
    if description == "current":
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor
    found = re.search(r'"deviceVer"\s*:\s*(\d+)', description)
    return int(found[1]) // 10 if found else 0  # what is no description, C++ refuses
