"""``python -m cudnn_ops.collect_env``: what a bug report needs to say of this machine."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import torch

import cudnn_ops
from cudnn_ops import _C, support
from cudnn_ops.ops.call import IS_FAST


def mapped_libraries(name: str) -> list[str]:
    """Paths of the libraries whose names begin with ``name`` that this process has mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if re.match(rf"{name}\w*\.so", Path(path).name))


def _nvrtc() -> str:
    """Where NVRTC is, which compiles cuDNN's attention and norm kernels; without it none run."""
    major = (torch.version.cuda or "13").split(".")[0]
    soname = f"libnvrtc.so.{major}"
    try:
        ctypes.CDLL(soname)
    except OSError as error:
        return f"not found ({error})"
    return ", ".join(mapped_libraries("libnvrtc")) or soname


def _loaded_cudnn() -> str:
    try:
        version = support.format_cudnn_version(_C.cudnn_version())
        return f"{version} from {_C.cudnn_path()}"
    except RuntimeError as error:
        return f"none ({error})"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch sees"
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return ", ".join(f"{p.name} (sm{p.major}{p.minor})" for p in properties)


def _store() -> str:
    info = cudnn_ops.store_info()
    state = f"not used: {info.refusal}" if info.refusal else f"{info.files} plans"
    return f"{info.folder} ({state})" if info.folder else "off"


def collect_env() -> dict[str, str]:
    """Names and values, in the order in which they are printed."""
    support.offer_wheels()
    versions = _C.versions()
    frontend = versions["frontend_headers"]
    return {
        "cudnn_ops": cudnn_ops.__version__,
        "built with CUDA kernels": "yes" if versions["with_cuda"] else "no (CPU-only torch)",
        "built against torch": versions["torch"],
        "built against cuDNN": support.format_cudnn_version(versions["cudnn_headers"]),
        "built against cuDNN Frontend": support.format_cudnn_version(frontend),
        "calls past torch.ops": "yes" if IS_FAST else "no (_fast.abi3.so cannot be loaded)",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch's CUDA": str(torch.version.cuda),
        "GPU": _gpus(),
        "cuDNN loaded": _loaded_cudnn(),
        "libcudnn mapped": ", ".join(mapped_libraries("libcudnn")) or "none",
        "NVRTC": _nvrtc(),
        "plan policy": cudnn_ops.plan_policy(),
        "plan store": _store(),
        "platform": platform.platform(),
    }


if __name__ == "__main__":
    for name, value in collect_env().items():
        print(f"{name + ':':30}{value}")
