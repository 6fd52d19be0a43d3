"""Builds against versions of torch, and runs a sample of the tests with versions of cuDNN.

    python -m tests.versions --cudnn 9.28.1.4
    python -m tests.versions --torch 2.11.0 2.15.0 --cudnn own 9.28.1.4

The first runs what is built here, in this environment, with that cuDNN in place of torch's. With
``--torch``, each gets an environment and a copy of the committed sources in ``build/versions``; one
that is there already is used again. What runs needs no GPU: CPU kernels, opcheck, and real plans of
that cuDNN for described GPUs. Prints a table, as it stands in ``docs/install.md``; the exit status
is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "versions"
NOTHING: Mapping[str, str] = MappingProxyType({})
#: What depends on cuDNN.
PLANS = ("deviceless", "test_known_bad.py")
#: Which of those do not: they run kernels of ours, with no plan.
KERNELS = ("*_kernels.py", "*launches.py")
#: What depends on torch too.
SAMPLE = (
    *PLANS,
    "test_conv.py",
    "test_gated.py",
    "test_import.py",
    "test_library.py",
    "test_norm.py",
    "test_opcheck.py",
    "test_sdpa.py",
    "test_varlen.py",
)
FACTS = """
import json, platform, torch
from cudnn_ops import _C
from cudnn_ops.support import format_cudnn_version
versions = _C.versions()
numbers = versions["frontend_headers"], versions["cudnn_headers"], _C.cudnn_version()
names = torch.__version__, torch.version.cuda or "none", platform.python_version()
print(json.dumps([*names, *map(format_cudnn_version, numbers)]))
"""


class Result(NamedTuple):
    """A row of the table."""

    torch: str
    cuda: str
    python: str
    frontend: str
    headers: str
    cudnn: str
    outcome: str

    @property
    def good(self) -> bool:
        return re.fullmatch(r"\d+ passed(, \d+ skipped)?", self.outcome) is not None


class Environment:
    """A Python with a torch, and the sources that are built against it: by default, these."""

    def __init__(self, python: str | Path = sys.executable, sources: Path = ROOT) -> None:
        self.python, self.sources = Path(python), sources

    def run(
        self, *command: str | Path, variables: Mapping[str, str] = NOTHING, **kwargs
    ) -> subprocess.CompletedProcess[str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | variables | {"PATH": path}
        words = [str(self.python), *map(str, command)]
        kwargs = {"check": True, "text": True} | kwargs
        return subprocess.run(words, env=environment, **kwargs)

    def install(self, *requirements: str | Path) -> None:
        self.run("-m", "pip", "install", "--quiet", "--no-compile", *requirements)

    def cudnn(self, version: str) -> Path | None:
        """That version's library, in a folder of its own; None for the one that torch brings.

        Torch finds its own by a path that is written in its libraries: only what is loaded before
        them takes its place. cuDNN's other libraries are found beside the first.
        """
        if version == "own":
            return None
        folder = PLACE / f"cudnn-{version}"
        library = folder / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
        if not library.exists():
            self.install("--no-deps", "--target", folder, f"nvidia-cudnn-cu13=={version}")
        return library

    def test(self, cudnn: str) -> Result:
        library = self.cudnn(cudnn)
        variables = {"LD_PRELOAD": str(library)} if library else {}
        how: dict[str, Any] = {"cwd": self.sources, "variables": variables}
        how["stdout"] = subprocess.PIPE
        facts: list[str] = json.loads(self.run("-c", FACTS, **how).stdout)
        if cudnn != "own" and not f"{cudnn}.".startswith(f"{facts[-1]}."):
            raise SystemExit(f"cuDNN {cudnn} was asked for and {facts[-1]} was loaded")
        names, ignored = (SAMPLE, ()) if cudnn == "own" else (PLANS, KERNELS)
        done = self.run(
            *("-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", "-n", "auto"),
            *("--maxprocesses", "4", "--maxschedchunk", "1"),
            *(f"--ignore-glob=tests/deviceless/{pattern}" for pattern in ignored),
            *(f"tests/{name}" for name in names),
            check=False,
            **how,
        )
        print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE), sep="\n")
        *_, last = ["no result", *done.stdout.splitlines()]
        outcome = re.sub(r" in [\d.]+s.*|, \d+ (?:deselected|warnings?)", "", last.strip("= "))
        return Result._make([*facts, outcome])


class NewEnvironment(Environment):
    """Made for a version of torch, of the frontend, and of cuDNN's headers ("own": torch's)."""

    def __init__(self, torch: str, frontend: str, headers: str) -> None:
        self.torch, self.frontend, self.headers = torch, frontend, headers
        self.folder = PLACE / f"torch-{torch}-frontend-{frontend}"
        super().__init__(
            self.folder / "venv" / "bin" / "python", self.folder / f"sources-{headers}"
        )

    def make(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)
        self.install(f"torch=={self.torch}", *tools())
        code = "import torch; print(torch.version.cuda)"
        cuda = self.run("-c", code, stdout=subprocess.PIPE).stdout.strip()
        self.install(*(f"nvidia-cuda-{part}=={cuda}.*" for part in ("crt", "cccl")))
        self.install("--no-deps", f"nvidia-cudnn-frontend=={self.frontend}")

    def build(self) -> None:
        if not self.python.exists():
            self.make()
        self.sources.mkdir(exist_ok=True)
        files = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", self.sources], input=files.stdout, check=True)
        library = self.cudnn(self.headers)
        folder = f"-DCUDNN_INCLUDE_DIR={library.parents[1] / 'include'}" if library else ""
        variables = {"CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} {folder}"}
        command = ("setup.py", "--quiet", "build_ext", "--inplace")
        self.run(*command, cwd=self.sources, variables=variables)

    def results(self, cudnns: list[str]) -> list[Result]:
        try:
            self.build()
        except subprocess.CalledProcessError as error:
            print(error)
            return [Result(self.torch, "", "", self.frontend, self.headers, "", "not built")]
        return [self.test(cudnn) for cudnn in cudnns]


def tools() -> list[str]:
    """What builds and tests need beside torch and NVIDIA's headers, as it is pinned."""
    wanted = {"cmake", "hypothesis", "ninja", "numpy", "pytest", "pytest-xdist", "setuptools"}
    pins = re.findall(r'^    "(.+)", +#', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return [pin for pin in pins if re.split(r"[=<>]", pin)[0] in {*wanted, "tqdm"}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=[], help="default: what is built here")
    parser.add_argument("--cudnn", nargs="+", default=["own"], help="'own' is torch's")
    parser.add_argument("--frontend", default="1.32.0")
    parser.add_argument("--headers", default="own", help="version of cuDNN that is built against")
    parser.add_argument("--remove", action="store_true", help="each environment when it was run")
    options = parser.parse_args()
    rows = [] if options.torch else [Environment().test(cudnn) for cudnn in options.cudnn]
    for torch in options.torch:
        environment = NewEnvironment(torch, options.frontend, options.headers)
        rows += environment.results(options.cudnn)
        if options.remove:
            shutil.rmtree(environment.folder)
    print("\n| torch | CUDA | Python | frontend | built against | cuDNN | tests |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
