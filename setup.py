"""Hands the build to CMake (CMakeLists.txt), with ninja; everything else is in pyproject.toml."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
BUILD = Path(os.environ.get("CUDNN_OPS_BUILD_DIR", ROOT / "build"))
NO_TORCH = (
    "cudnn_ops is built against the torch that it will run with, and there is none here. Install "
    "it first (pip install torch==2.11.0), then build without isolation: pip install "
    "--no-build-isolation ."
)


def torch_version() -> str | None:
    """Major and minor version, which a build is for."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return None


class CMakeBuild(build_ext):
    """Builds the whole tree at once, into the package folder; a wheel has its part of that.

    CMake gets what the environment variable CMAKE_ARGS says, too.
    """

    def run(self) -> None:
        if torch_version() is None:
            sys.exit(NO_TORCH)
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"cudnn_ops needs {tool} to build: pip install {tool}")
        configure = [
            "cmake",
            "-GNinja",
            f"-S{ROOT}",
            f"-B{BUILD}",
            f"-DPython_EXECUTABLE={sys.executable}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        package = Path(self.build_lib).resolve() / "cudnn_ops"
        install = ["cmake", "--install", str(BUILD), "--component", "wheel", "--prefix"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run(["cmake", "--build", BUILD], check=True)
            if not self.inplace:
                subprocess.run([*install, str(package), "--strip"], check=True)
        except subprocess.CalledProcessError:
            sys.exit("cudnn_ops was not built; CMake's message above says what is missing")
        if not self.inplace:
            add_plans(package)


def add_plans(package: Path) -> None:
    """Plans of common shapes for the GPUs in CUDNN_OPS_PLANS, such as "h200 b200:13.1".

    Behind the colon is the driver's version of CUDA, where it is not the description's. Each takes
    minutes and needs cuDNN and NVRTC, which come with torch, and no GPU.
    """
    folder = package / "plans" / "common_plans"
    bundle = [sys.executable, "-B", "-m", "cudnn_ops", "bundle", "--common", "--out", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(package.parent), "CUDNN_OPS_CACHE_DIR": ""}
    for gpu in os.environ.get("CUDNN_OPS_PLANS", "").split():
        folder.mkdir(exist_ok=True)
        device, _, driver = gpu.partition(":")
        command = [*bundle, "--device", device, *(["--driver", driver] if driver else [])]
        # Elsewhere than in the sources, which have a package of the same name.
        if subprocess.run(command, cwd=package.parent, env=environment, check=False).returncode:
            sys.exit(f"CUDNN_OPS_PLANS: the plans for {gpu} were not built")
    for file in folder.glob("*.bundle"):
        file.chmod(0o644)


class WheelOfOneTorch(bdist_wheel):
    """For every Python: the library has none in it, and the binding what all of them have."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def facts() -> tuple[str, list[str]]:
    """The version and what is required, which a wheel has of the torch that it was built against.

    The sources are for every torch.
    """
    text = (ROOT / "cudnn_ops" / "__init__.py").read_text()
    (number,) = re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)
    others = ["tqdm>=4.60"]  # warmup's progress bar
    torch = None if "sdist" in sys.argv else torch_version()
    if torch is None:
        return number, ["torch>=2.11", *others]
    return f"{number}+torch{torch}", [f"torch=={torch}.*", *others]


_version, _requirements = facts()
setup(
    version=_version,
    install_requires=_requirements,
    # The extension's only purpose is to make the wheel one of this platform.
    ext_modules=[Extension("cudnn_ops.libtorch_cudnn_ops", [])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": WheelOfOneTorch},
)
