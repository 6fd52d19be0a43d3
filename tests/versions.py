"""Builds against versions of torch, and runs a sample of the tests with versions of cuDNN.

    python -m tests.versions --torch 2.11.0 2.15.0 --cudnn 9.19.0.56 9.28.1.4

Each torch gets an environment and a copy of the sources in ``build/versions``; an environment that
is there already is used again. What runs needs no GPU: CPU kernels, opcheck, and real plans of that
cuDNN for described GPUs. Prints a table, as it stands in ``docs/install.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "versions"
SAMPLE = (
    "deviceless",
    "test_conv.py",
    "test_gated.py",
    "test_import.py",
    "test_known_bad.py",
    "test_library.py",
    "test_norm.py",
    "test_opcheck.py",
    "test_sdpa.py",
    "test_varlen.py",
)
FACTS = """
import json, platform, torch
print(json.dumps([platform.python_version(), torch.__version__, torch.version.cuda]))
"""


class Result(NamedTuple):
    """A row of the table."""

    torch: str
    cuda: str
    python: str
    cudnn: str
    frontend: str
    outcome: str


class Environment:
    """A torch, what its build needs, and the sources built against it."""

    def __init__(self, torch: str, frontend: str) -> None:
        self.torch, self.frontend = torch, frontend
        self.folder = PLACE / f"torch-{torch}-frontend-{frontend}"
        self.python = self.folder / "venv" / "bin" / "python"
        self.sources = self.folder / "sources"

    def run(self, *command: str, **kwargs) -> subprocess.CompletedProcess[str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path}
        return subprocess.run(
            [str(self.python), *command],
            check=kwargs.pop("check", True),
            text=True,
            env=environment,
            **kwargs,
        )

    def facts(self) -> tuple[str, str, str]:
        done = self.run("-c", FACTS, stdout=subprocess.PIPE)
        python, torch, cuda = json.loads(done.stdout)
        return python, torch, cuda

    def install(self, *requirements: str) -> None:
        self.run("-m", "pip", "install", "--quiet", *requirements)

    def make(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self.folder / "venv"], check=True)
        self.install(f"torch=={self.torch}", *tools())
        cuda = self.facts()[2]
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
        self.run("setup.py", "--quiet", "build_ext", "--inplace", cwd=self.sources)

    def test(self, cudnn: str) -> str:
        self.install("--no-deps", f"nvidia-cudnn-cu13=={cudnn}")
        done = self.run(
            *("-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider"),
            *(f"tests/{name}" for name in SAMPLE),
            cwd=self.sources,
            stdout=subprocess.PIPE,
            check=False,
        )
        print(*re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE), sep="\n")
        *_, last = done.stdout.splitlines()
        return re.sub(r" in [\d.]+s.*|, \d+ (?:deselected|warnings?)", "", last.strip("= "))


def tools() -> list[str]:
    """What builds and tests need beside torch and NVIDIA's headers, as it is pinned."""
    wanted = {"cmake", "hypothesis", "ninja", "numpy", "pytest", "setuptools", "tqdm"}
    pins = re.findall(r'^    "(.+)", +#', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return [pin for pin in pins if re.split(r"[=<>]", pin)[0] in wanted]


def results(torch: str, frontend: str, cudnns: list[str]) -> list[Result]:
    environment = Environment(torch, frontend)
    try:
        environment.build()
    except subprocess.CalledProcessError as error:
        print(error)
        return [Result(torch, "", "", "", frontend, "not built")]
    python, version, cuda = environment.facts()
    return [
        Result(version, cuda, python, cudnn, frontend, environment.test(cudnn)) for cudnn in cudnns
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="+", default=["2.11.0"])
    parser.add_argument("--cudnn", nargs="+", default=["9.19.0.56"])
    parser.add_argument("--frontend", nargs="+", default=["1.32.0"])
    options = parser.parse_args()
    rows = [
        row
        for torch in options.torch
        for frontend in options.frontend
        for row in results(torch, frontend, options.cudnn)
    ]
    print("\n| torch | CUDA | Python | cuDNN | frontend | tests |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
