"""Compiles a CUDA source to PTX by the NVRTC that torch brings, as a C++ header with a string.

    python compile_ptx.py source.cu header.h kName [-DMACRO=value ...]

The lowest architecture that cudnn_ops runs on is compiled for; the driver makes the rest of it.
"""

import ctypes
import sys
from pathlib import Path

ARCHITECTURE = b"--gpu-architecture=compute_80"


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


def compile_ptx(source: Path, macros: list[str]) -> str:
    nvrtc = find_nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None
    )
    options = [ARCHITECTURE, f"--include-path={source.parent}".encode()]
    options += [macro.encode() for macro in macros]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    if status != 0:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"{source} does not compile:\n{log.value.decode()}")
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.value.decode()


def main() -> None:
    source, header, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    ptx = compile_ptx(source, sys.argv[4:])
    header.write_text(
        f"// Made from {source.name} by compile_ptx.py.\n#pragma once\n\n"
        f'constexpr const char* {name} = R"PTX({ptx})PTX";\n'
    )


if __name__ == "__main__":
    main()
