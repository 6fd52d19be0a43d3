"""Compiles a CUDA source by the NVRTC that torch brings, as a C++ header with what it gives.

    python compile_kernels.py source.cu header.h kName [-DMACRO=value ...]

Beside the header comes header.h.d, which says what it was made from, in Ninja's and make's form.
For the architectures below it is machine code, so that the first call need not wait for a compiler;
for newer ones there is the last one's PTX, which the driver compiles (0.5 s, once: it keeps what it
made).
"""

import ctypes
import re
import sys
from pathlib import Path

#: Compute capabilities in ascending order; code for one runs on the later ones of the same major
#: version.
ARCHITECTURES = (80, 90)
_ESCAPED = [f"\\{byte:03o}" for byte in range(256)]


def find_nvrtc() -> ctypes.CDLL:
    for folder in (Path(entry) / "nvidia" for entry in sys.path):
        for library in sorted(folder.glob("c*/lib/libnvrtc.so.1*")):
            # NVRTC looks for this by its name alone.
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    try:
        return ctypes.CDLL("libnvrtc.so.13")
    except OSError:
        raise SystemExit("NVRTC was not found: `pip install nvidia-cuda-nvrtc`") from None


def include_folders(source: Path) -> tuple[Path, Path]:
    """Headers for both sides name others from the root, as C++ does."""
    return source.parent, source.parents[1]


def sources_of(source: Path) -> list[Path]:
    """The source and every header of ours that it includes, whatever its macros are."""
    found = [source]
    for path in found:
        for name in re.findall(r'^\s*#\s*include "(.+)"', path.read_text(), re.MULTILINE):
            header = next(f / name for f in include_folders(source) if (f / name).exists())
            if header not in found:
                found.append(header)
    return found


def compile_for(
    nvrtc: ctypes.CDLL, source: Path, architecture: int, macros: list[str]
) -> tuple[bytes, bytes]:
    """Machine code for an architecture, and the PTX that it was assembled from."""
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    folders = (f"--include-path={folder}" for folder in include_folders(source))
    words = [f"--gpu-architecture=sm_{architecture}", *folders, *macros]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    status = nvrtc.nvrtcCompileProgram(program, len(words), options)
    if status != 0:
        log = _output(nvrtc, "ProgramLog", program).decode().rstrip("\0")
        raise SystemExit(f"{source} does not compile:\n{log}")
    return _output(nvrtc, "CUBIN", program), _output(nvrtc, "PTX", program)


def _output(nvrtc: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer)
    return buffer.raw[: size.value]


def as_string(data: bytes) -> str:
    """A C++ string literal, in pieces short enough for every compiler."""
    pieces = (data[i : i + 4000] for i in range(0, len(data), 4000))
    return "\n".join(f'"{"".join(map(_ESCAPED.__getitem__, piece))}"' for piece in pieces)


def main() -> None:
    source, header, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    nvrtc = find_nvrtc()
    images = []
    for architecture in ARCHITECTURES:
        code, ptx = compile_for(nvrtc, source, architecture, sys.argv[4:])
        images.append((architecture // 10, code))
    images.append((0, ptx))  # the newest architecture's
    rows = ",\n".join(f"{{{major},\n{as_string(data)}}}" for major, data in images)
    header.write_text(
        f"// Made from {source.name} by compile_kernels.py.\n#pragma once\n\n"
        '#include "kernels/device_kernel.h"\n\n'
        f"constexpr cudnn_ops::KernelImage {name}[] = {{\n{rows}}};\n"
    )
    escaped = (str(path).replace(" ", r"\ ") for path in sources_of(source))
    header.with_name(f"{header.name}.d").write_text(f"{header}: {' '.join(escaped)}\n")


if __name__ == "__main__":
    main()
