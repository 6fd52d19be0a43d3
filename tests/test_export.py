"""torch.export and AOTInductor: packages run from Python, and from C++ with no Python there."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import cudnn_ops
from cudnn_ops.nn import fuse_conv_bn_act_
from examples.export import compile_package
from examples.llama import Llama, LlamaConfig, Operators
from tests.conftest import DEVICES
from tests.test_nn_conv import check, randomize

ROOT = Path(__file__).parents[1]
#: Quick to compile; nothing here is timed.
INDUCTOR = {
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


class Case(NamedTuple):
    model: nn.Module
    stock: nn.Module
    """The same in torch's operators."""
    draw: Callable[[int, int], Tensor]
    """An input of a batch and a length."""
    dynamic: dict[int, Any]


def llama() -> Case:
    torch.manual_seed(1)
    sizes = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, sequence=64)
    model = Llama(sizes, Operators.named("cudnn_ops")).eval()
    stock = Llama(sizes, Operators.named("torch")).eval()
    stock.load_state_dict(model.state_dict())
    dynamic = {0: Dim("batch", min=1, max=8), 1: Dim("sequence", min=2, max=64)}
    return Case(model, stock, lambda *shape: torch.randint(0, 256, shape), dynamic)


def resnet() -> Case:
    from torchvision.models.resnet import BasicBlock, ResNet

    stock = randomize(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10))
    fused = fuse_conv_bn_act_(copy.deepcopy(stock))
    dynamic = {0: Dim("batch", min=1, max=8)}
    return Case(fused, stock, lambda batch, _: torch.randn(batch, 3, 32, 32), dynamic)


CASES = {"llama": llama, "resnet": resnet}


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    # The programs of the environment that runs this first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | options.pop("env", {})
    return subprocess.run(command, capture_output=True, text=True, env=env, **options)


@contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """One for all processes of a run, which have it one at a time."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / name).mkdir(exist_ok=True)
        yield folder / name


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of examples/cpp, built once for all processes of a run."""
    prefixes = f"{torch.utils.cmake_prefix_path};{cudnn_ops.cmake_prefix_path}"
    with shared_folder(tmp_path_factory, "cpp") as build:
        configure = ["cmake", "-GNinja", f"-S{ROOT / 'examples' / 'cpp'}", f"-B{build}"]
        # What some systems' compilers tell the linker by themselves.
        configure += [f"-DCMAKE_PREFIX_PATH={prefixes}", "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"]
        for command in (configure, ["cmake", "--build", str(build)]):
            result = run(command)
            assert result.returncode == 0, result.stdout + result.stderr
    return build


#: Of torch alone, compiled as the tests' models are.
STOCK_PACKAGE = f"""
import sys, torch
x = torch.ones(2, 8, device=sys.argv[1])
program = torch.export.export(torch.nn.Linear(8, 8, device=sys.argv[1]), (x,))
path = torch._inductor.aoti_compile_and_package(
    program, package_path=sys.argv[2], inductor_configs={INDUCTOR}
)
torch._inductor.aoti_load_package(path)(x)
"""


def signal_of_a_stock_package(device: str, folder: Path) -> str:
    """The name of the signal that ends a process which loads one, if any does."""
    result = run([sys.executable, "-c", STOCK_PACKAGE, device, str(folder / "stock.pt2")])
    return Signals(-result.returncode).name if result.returncode < 0 else ""


@pytest.fixture(scope="session")
def signal_on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> str:
    with shared_folder(tmp_path_factory, "stock") as folder:
        answer = folder / "signal"
        if not answer.exists():
            answer.write_text(signal_of_a_stock_package("cuda", folder))
        return answer.read_text()


@pytest.fixture
def packages_load(device: str, request: pytest.FixtureRequest) -> None:
    """Skips on machines whose compiler makes packages that no process survives loading.

    So it is where a package gets a libstdc++ of its own, beside the one that torch has loaded: the
    regular expression by which torch's code in it reads the name of the device calls a wrong
    function.
    """
    signal = request.getfixturevalue("signal_on_a_gpu") if device == "cuda" else ""
    if signal:
        pytest.skip(f"a package of one torch.nn.Linear, too, ends by {signal} on this machine")


def kept_operators(path: str) -> set[str]:
    """Those that the package calls by the dispatcher."""
    with zipfile.ZipFile(path) as archive:
        lists = [n for n in archive.namelist() if n.endswith(".wrapper.json")]
        nodes = [node for name in lists for node in json.loads(archive.read(name))["nodes"]]
    return {node["node"]["target"] for node in nodes}


def without_python(programs: Path, package: str, inputs: list[Tensor], folder: Path) -> Any:
    """What the C++ program computes, or its complaint."""
    torch.save(inputs, folder / "inputs.pt")
    files = [package, str(folder / "inputs.pt"), str(folder / "outputs.pt")]
    # The loader tells of every library that the process loads.
    result = run([str(programs / "run_package"), *files], env={"LD_DEBUG": "files"})
    assert "libtorch_cudnn_ops.so" in result.stderr
    assert not re.search(r"libpython|libtorch_python", result.stderr)
    return torch.load(folder / "outputs.pt") if result.returncode == 0 else result.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_model_runs_with_and_without_python(
    name, device, packages_load, programs, tmp_path, without_tf32, monkeypatch
):
    """On a GPU with our operators; on a CPU in torch's, for the kernels there are Python's."""
    case = CASES[name]()
    model, stock = case.model.to(device), copy.deepcopy(case.stock).to(device)
    example = (case.draw(2, 16).to(device),)
    path = compile_package(model, example, tmp_path / "model.pt2", (case.dynamic,), INDUCTOR)
    kept = {target for target in kept_operators(path) if target.startswith("cudnn_ops::")}
    ours = {"llama": {"sdpa", "_norm", "_gated", "_rotary"}, "resnet": {"_conv"}}[name]
    assert kept == ({f"cudnn_ops::{op}" for op in ours} if device == "cuda" else set())

    loaded = torch._inductor.aoti_load_package(path)
    for shape in ((2, 16), (3, 33), (1, 64)):
        x = case.draw(*shape)
        out = loaded(x.to(device))
        exact = case.stock.double()(x if x.dtype == torch.int64 else x.double())
        check([out.cpu()], [stock(x.to(device)).cpu()], [exact])
        (same,) = without_python(programs, path, [x.to(device)], tmp_path)
        with monkeypatch.context() as patch:  # as the program, which sets nothing
            patch.setattr(torch.backends.cudnn, "allow_tf32", True)
            torch.testing.assert_close(same, loaded(x.to(device)))


class EveryFamily(nn.Module):
    """Operators with every type of argument and result that theirs have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.sinks = nn.Parameter(torch.randn(32)), nn.Parameter(torch.randn(4))
        self.kernel, self.bias = nn.Parameter(torch.randn(4, 2, 3, 3)), nn.Parameter(torch.randn(4))

    def forward(
        self, x, mask, cu_seqlens, image, key_cache, value_cache, page_table, lengths, slots
    ):
        length = x.shape[1]
        normed, total = cudnn_ops.add_rms_norm(
            cudnn_ops.layer_norm(x, (32,), self.weight), x, (32,), self.weight, eps=1e-5
        )
        heads = normed.unflatten(-1, (4, 8))
        query, packed = heads.transpose(1, 2), heads.flatten(0, 1)
        angles = torch.arange(length, device=x.device)[None, :, None].expand(1, length, 8) / 8
        cudnn_ops.paged_kv_append_(key_cache, value_cache, packed[:, :2], packed[:, 2:], slots)
        return (
            *cudnn_ops.scaled_dot_product_attention_with_lse(
                query,
                query[:, :2],
                query[:, 2:],
                mask,
                enable_gqa=True,
                window_size=(5, 0),
                softcap=3.0,
                sinks=self.sinks,
            ),
            cudnn_ops.varlen_attention(
                packed, packed, packed, cu_seqlens, cu_seqlens, length, length, causal=True
            ),
            *cudnn_ops.paged_attention_with_lse(
                heads, key_cache, value_cache, page_table, lengths, is_causal=True
            ),
            cudnn_ops.rotary_embedding(query, angles.cos(), angles.sin()),
            cudnn_ops.geglu(normed, total, approximate="tanh"),
            cudnn_ops.conv2d(
                image,
                self.kernel,
                self.bias,
                stride=(2, 1),
                padding="valid",
                groups=2,
                activation="relu",
            ),
        )


def inputs_of_every_family(batch: int, length: int) -> tuple[Tensor, ...]:
    pages = -(-length // 4)
    starts = torch.arange(batch)[:, None] * pages * 4
    return (
        torch.randn(batch, length, 32),
        torch.randn(batch, 1, length, length),
        torch.arange(batch + 1, dtype=torch.int32) * length,
        torch.randn(batch, 4, 9, 10),
        torch.zeros(batch * pages, 4, 2, 8),
        torch.zeros(batch * pages, 4, 2, 8),
        torch.arange(batch * pages, dtype=torch.int32).view(batch, pages),
        torch.full((batch,), length, dtype=torch.int32),
        (starts + torch.arange(length)).flatten(),
    )


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_every_operator_stays_an_operator(device, packages_load, programs, tmp_path, without_tf32):
    """AOTInductor calls them with optional tensors, symbolic sizes, lists, several results."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(2)
    model = EveryFamily().to(device, dtype)

    def draw(batch: int, length: int) -> tuple[Tensor, ...]:
        drawn = inputs_of_every_family(batch, length)
        return tuple(x.to(device, dtype if x.is_floating_point() else None) for x in drawn)

    auto = Dim.AUTO
    dynamic = ({0: auto, 1: auto}, {0: auto, 2: auto, 3: auto}, *[{0: auto}] * 4)
    dynamic += ({0: auto, 1: auto}, {0: auto}, {0: auto})
    program = torch.export.export(model, draw(2, 10), dynamic_shapes=dynamic)
    # On a CPU too, where `compile_package` would decompose.
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "every.pt2"), inductor_configs=INDUCTOR
    )
    names = "sdpa_with_lse varlen_attention paged_attention_with_lse paged_kv_append_"
    ours = {f"cudnn_ops::{name}" for name in f"{names} _norm _gated _rotary _conv".split()}
    assert ours <= kept_operators(path)

    loaded = torch._inductor.aoti_load_package(path)
    inputs = draw(3, 7)
    eager = [x.clone() for x in inputs]
    expected = [*model(*eager), *eager[4:6]]
    tolerance = {} if device == "cpu" else {"rtol": 0.02, "atol": 0.02}
    again = [x.clone() for x in inputs]
    torch.testing.assert_close([*loaded(*again), *again[4:6]], expected, **tolerance)
    results = without_python(programs, path, list(inputs), tmp_path)
    if device == "cpu":
        assert "Could not run 'cudnn_ops::_norm' with arguments from the 'CPU'" in results
    else:
        torch.testing.assert_close(list(results), expected[:-2], **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_called_from_cpp(device, programs, tmp_path):
    env = {"CUDNN_OPS_CACHE_DIR": str(tmp_path / "store")}
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    result = run([str(programs / "call_operators")], env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    schema, said = result.stdout.splitlines()
    # As C++ writes it; Python's has the same order.
    names = [part.split("=")[0].split()[-1] for part in schema.split("(", 1)[1].split(", ")]
    arguments = torch.ops.cudnn_ops.sdpa.default._schema.arguments
    assert [name for name in names if name != "*"][:-1] == [a.name for a in arguments][:-1]
    assert ("no GPU" in said) == (device == "cpu")
    assert (tmp_path / "store").exists() == (device == "cuda")


PROJECT = """
cmake_minimum_required(VERSION 3.22)
project(none LANGUAGES CXX)
find_package(cudnn_ops REQUIRED)
"""


def test_a_package_for_another_torch_is_refused(tmp_path):
    """By find_package, and not by the linker or at run time."""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    other = tmp_path / "torch" / "share" / "cmake" / "Torch"
    other.mkdir(parents=True)
    (other / "TorchConfigVersion.cmake").write_text('set(PACKAGE_VERSION "2.10.1")\n')
    built = ".".join(torch.__version__.split(".")[:2])
    for torch_dir, complaint in (
        (tmp_path / "torch", f"built against torch {built}, and this is torch 2.10"),
        (tmp_path / "nowhere", "torch was not found"),
    ):
        prefixes = f"{torch_dir};{cudnn_ops.cmake_prefix_path}"
        command = ["cmake", "-GNinja", f"-DCMAKE_PREFIX_PATH={prefixes}", f"-S{tmp_path}"]
        result = run([*command, f"-B{tmp_path / torch_dir.name / 'build'}"])
        assert result.returncode != 0
        # CMake breaks lines.
        assert complaint in " ".join(result.stderr.split())
