"""The wheel: made from what is built already, installed apart, used where there is no compiler."""

from __future__ import annotations

import email
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnn_ops
from tests.wheels import MACHINES, check, defects

ROOT = Path(__file__).parents[1]
TORCH = ".".join(torch.__version__.split(".")[:2])

EXAMPLE = """
import shutil
assert not [tool for tool in ("c++", "cc", "cmake", "g++", "gcc", "ninja") if shutil.which(tool)]
import torch, cudnn_ops
x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
out = cudnn_ops.scaled_dot_product_attention(x, x, x, is_causal=True)
out.sum().backward()
exact = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
torch.testing.assert_close(out, exact)
torch.library.opcheck(torch.ops.cudnn_ops.swiglu.default, (x.detach(), x.detach()))
from cudnn_ops.ops import call
assert call._FAST
answer = cudnn_ops.support.explain("rms_norm", ((64, 1024), torch.bfloat16), device="h200")
assert answer.supported, answer
print(cudnn_ops.__file__)
"""

BACKEND = """
import torch
from torch._dynamo import list_backends, lookup_backend
assert "cudnn_ops" in list_backends()
print(lookup_backend("cudnn_ops").__module__)
"""


def run(*command: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **kwargs
    )


def setup(*command: str | Path, temporary: Path) -> None:
    """``setup.py``, which leaves nothing in the source folder."""
    done = run(
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", temporary),
        *command,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def configure(sources: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """CMake alone, which finds what the build takes."""
    return run(
        *("cmake", "-GNinja", f"-S{sources}", f"-B{folder}", *options),
        *(f"-DPython_EXECUTABLE={sys.executable}", f"-DCUDNN_OPS_OUTPUT_DIR={folder}/package"),
    )


def import_error(torch_version: str) -> str:
    code = f"import torch; torch.__version__ = {torch_version!r}; import cudnn_ops"
    done = run(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


@pytest.mark.skipif(
    not (ROOT / "build" / "build.ninja").exists(), reason="`make build` has not been run here"
)
def test_the_wheel(tmp_path):
    build = ("build", "--build-base", tmp_path / "build")
    setup(*build, "bdist_wheel", "--dist-dir", tmp_path, temporary=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    name = f"cudnn_ops-{cudnn_ops.__version__}+torch{TORCH}"
    assert re.fullmatch(rf"{re.escape(name)}-py3-none-linux_\w+\.whl", wheel.name)

    assert check(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{name}.dist-info/METADATA").decode()
        names = set(archive.namelist())
    metadata = email.message_from_string(text)
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert f"torch=={TORCH}.*" in required
    assert metadata["Requires-Python"] == ">=3.10"
    for needed in ("LICENSE", "NOTICE"):
        assert f"{name}.dist-info/licenses/{needed}" in names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "cudnn_ops").rglob("*.py")}
    built = {"cudnn_ops/stub/libcuda.so.1", "cudnn_ops/py.typed", "cudnn_ops/_fast.abi3.so"}
    built.add("cudnn_ops/share/cmake/cudnn_ops/cudnn_opsConfig.cmake")
    assert names >= sources | built

    site = tmp_path / "site"
    done = run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
        *("--target", site, wheel),
    )
    assert done.returncode == 0, done.stderr

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    shutil.rmtree(tmp_path / "build")
    environment = os.environ | {"PYTHONPATH": str(site), "PATH": str(nothing)}
    done = run(sys.executable, "-c", EXAMPLE, env=environment, cwd=nothing)
    assert done.stdout.strip() == str(site / "cudnn_ops" / "__init__.py"), done.stderr
    # torch.compile finds the backend by its name, without an import.
    done = run(sys.executable, "-c", BACKEND, env=environment, cwd=nothing)
    assert done.stdout.strip() == "cudnn_ops.compiler.backend", done.stderr


@pytest.mark.skipif(
    not (ROOT / "build" / "build.ninja").exists(), reason="`make build` has not been run here"
)
def test_the_plans_of_a_wheel_are_those_that_the_environment_names(tmp_path):
    done = run(
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", tmp_path),
        *("build", "--build-base", tmp_path / "build"),
        cwd=ROOT,
        env=os.environ | {"CUDNN_OPS_PLANS": "no_gpu:13.1"},
    )
    assert done.returncode != 0
    assert "'no_gpu' is not \"current\", not one of a100, " in done.stderr
    assert "CUDNN_OPS_PLANS: the plans for no_gpu:13.1 were not built" in done.stderr


def test_the_sources_are_enough_to_build(tmp_path):
    setup("sdist", "--dist-dir", tmp_path, temporary=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"cudnn_ops-{cudnn_ops.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        file = tar.extractfile(f"cudnn_ops-{cudnn_ops.__version__}/PKG-INFO")
        assert file is not None
        assert "Requires-Dist: torch>=2.11\n" in file.read().decode()
        # Python 3.10 and 3.11 have it since a bug fix.
        safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        tar.extractall(tmp_path, **safely)
    wanted = {"CMakeLists.txt", "LICENSE", "NOTICE", "pyproject.toml", "setup.py"}
    wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert not wanted - names
    assert not [name for name in names if name.endswith((".so", ".so.1"))]

    folder = tmp_path / f"cudnn_ops-{cudnn_ops.__version__}"
    done = configure(folder, tmp_path / "configured")
    assert done.returncode == 0, done.stderr
    read = re.findall(rf"{folder}/[^\s:|;\"]+", (tmp_path / "configured/build.ninja").read_text())
    assert any(path.endswith("norm_cuda.cpp") for path in read)
    assert [path for path in read if not Path(path).exists()] == []


@pytest.mark.parametrize("version", ["2.10.1", "2.12.0+cu130", "3.0.0"])
def test_under_another_torch_it_says_which_wheel_to_take(version):
    minor = ".".join(version.split(".")[:2])
    assert import_error(version) == (
        f"ImportError: this cudnn_ops was built for torch {TORCH} and this is torch {version}: "
        f"install the wheel of cudnn_ops whose version ends in +torch{minor}, or build it against "
        "this torch with `pip install --no-build-isolation .` in its source folder"
    )


def test_a_patch_release_of_torch_is_the_same():
    code = f"import torch; torch.__version__ = '{TORCH}.9'; import cudnn_ops"
    assert run(sys.executable, "-c", code, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [("none", "has not been built"), ("cut", "is not whole, or of another version")],
)
def test_without_a_library(damage, message, tmp_path):
    package = tmp_path / "cudnn_ops"
    package.mkdir()
    for name in ("__init__.py", "_library.py"):
        shutil.copy(ROOT / "cudnn_ops" / name, package)
    if damage == "cut":
        (package / "libtorch_cudnn_ops.so").write_bytes(b"\x7fELF" + bytes(100))
    done = run(sys.executable, "-c", "import cudnn_ops", cwd=tmp_path)
    assert message in done.stderr.splitlines()[-1]


def test_a_library_of_another_machine_is_found_out():
    library = ROOT / "cudnn_ops" / "libtorch_cudnn_ops.so"
    machine = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    found = defects(library, machine)
    assert found[0] == f"{library.name}: it is for {MACHINES[platform.machine()]}"
    # The one that is worked with has the build's own run paths.
    assert any("its run path is" in defect for defect in found)
