"""Hands the build to CMake (CMakeLists.txt), with ninja; everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Builds the whole tree at once; ``--inplace`` leaves the products in the package folder."""

    def run(self) -> None:
        if find_spec("torch") is None:
            sys.exit(
                "cudnn_ops is built against the torch that it will run with, and there is none "
                "here. Install it first (pip install torch==2.11.0), then build without "
                "isolation: pip install --no-build-isolation ."
            )
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"cudnn_ops needs {tool} to build: pip install {tool}")
        package = ROOT if self.inplace else Path(self.build_lib).resolve()
        build = Path(os.environ.get("CUDNN_OPS_BUILD_DIR", ROOT / "build"))
        configure = [
            "cmake",
            "-GNinja",
            f"-S{ROOT}",
            f"-B{build}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCUDNN_OPS_OUTPUT_DIR={package / 'cudnn_ops'}",
        ]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", build], check=True)
        except subprocess.CalledProcessError:
            sys.exit("cudnn_ops was not built; CMake's message above says what is missing")


# The extension's only purpose is to make the wheel one of this platform.
setup(
    ext_modules=[Extension("cudnn_ops.libtorch_cudnn_ops", [])], cmdclass={"build_ext": CMakeBuild}
)
