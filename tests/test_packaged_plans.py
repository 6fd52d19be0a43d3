"""Plans that come with the package: who reads them and when, and who builds its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnn_ops
from cudnn_ops import PlanRequest, build_bundle, unload_bundle, warmup
from cudnn_ops.__main__ import main
from cudnn_ops.plans import bundle_command, common, packaged
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run
from tests.test_bundle import H200, flip, parts, write

pytestmark = pytest.mark.usefixtures("fresh_cache")
HEADS = common.DECODERS[-1]
SIZES = common.Sizes(1, 1024)
#: Any batch and length that the plans of SIZES serve.
QUERY = ((1, HEADS.query, 333, HEADS.size), torch.bfloat16)
_numbers = count()


def requests() -> list[PlanRequest]:
    """A forward in inference, one in training, and its backward."""
    arguments = (HEADS, SIZES, True)
    both = (common.attention_plans(*arguments, training, "h200") for training in (False, True))
    return list(dict.fromkeys(request for plans in both for request in plans))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("common_plans")
    path = folder / packaged.file_name(H200)
    report = build_bundle(requests(), "h200", path, progress=False)
    assert (report.plans, report.refused, report.left_out) == (3, {}, {})
    return path


@pytest.fixture
def path(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package's file, to spoil."""
    folder = tmp_path / "common_plans"
    folder.mkdir()
    path = folder / built.name
    shutil.copy2(built, path)
    monkeypatch.setattr(packaged, "FOLDER", folder)
    yield path
    unload_bundle(path)


@pytest.fixture
def gpu(tmp_path: Path) -> Callable[..., Path]:
    """Makes GPUs that nobody has asked about yet."""

    def make(base: str = H200, **changes: object) -> Path:
        number = next(_numbers)
        path = tmp_path / f"gpu{number}.json"
        path.write_text(json.dumps(json.loads(base) | {"source": f"test {number}"} | changes))
        return path

    return make


def ask(device: Path) -> list[str]:
    """Asks for all plans; where each is from."""
    options: dict[str, Any] = {"is_causal": True, "polymorphic": True, "device": device}
    return [
        explain("sdpa", QUERY, **options).source,
        explain("sdpa", QUERY, with_lse=True, **options).source,
        explain("sdpa_backward", QUERY, **options).source,
    ]


def files_read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read = []
    serve = packaged.serve

    def noting(path: Path, *arguments, **options):
        read.append(path)
        return serve(path, *arguments, **options)

    monkeypatch.setattr(packaged, "serve", noting)
    return read


def is_built_silently(device: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ask(device) == ["build"] * 3 and cudnn_ops.cache_info()[1:3] == (3, 0)


# --- what they are for ------------------------------------------------------------------


def test_nothing_is_built_for_listed_shapes(path, gpu):
    device = gpu()
    assert ask(device) == ["package"] * 3
    assert cudnn_ops.cache_info()[1:3] == (0, 3)
    explanation = explain("sdpa", QUERY, is_causal=True, polymorphic=True, device=device)
    assert "\n  plan: from the package\n" in str(explanation)


def test_every_batch_and_length_up_to_the_listed_ones(path, gpu):
    device, rng = gpu(), random.Random(0)
    for _ in range(20):
        query = ((1, HEADS.query, rng.randint(1, SIZES.length), HEADS.size), torch.bfloat16)
        answer = explain("sdpa", query, is_causal=True, polymorphic=True, device=device)
        assert answer.source == "package"
    assert cudnn_ops.cache_info()[1:3] == (0, 1)


def test_other_shapes_are_built(path, gpu):
    device = gpu()
    answer = explain("sdpa", QUERY, is_causal=False, polymorphic=True, device=device)
    assert answer.source == "build"
    assert "plan:" not in str(answer)
    assert explain("sdpa", QUERY, is_causal=True, device=device).source == "build"  # exact


@pytest.mark.skipif(cudnn_ops._C.cudnn_version() >= 92700, reason="it compares memory's width")
def test_plans_of_an_h200_serve_an_h100(path, gpu):
    h100 = Path(cudnn_ops.__file__).parent / "support/devices/h100.json"
    assert ask(gpu(h100.read_text())) == ["package"] * 3


def test_the_header_is_read_once_for_each_gpu(path, gpu, monkeypatch):
    read = files_read(monkeypatch)
    first, second = gpu(), gpu()
    for device in (first, second, first):
        assert ask(device) == ["package"] * 3
        cudnn_ops.cache_clear()
    assert read == [path, path]


def test_nothing_is_read_that_nobody_needs(path, gpu, store, monkeypatch):
    read = files_read(monkeypatch)
    x = torch.randn(1, 2, 8, 16)
    cudnn_ops.scaled_dot_product_attention(x, x, x)
    device = gpu()
    monkeypatch.setattr(packaged, "FOLDER", path.parent / "none")
    ask(device)  # built, and stored
    cudnn_ops.cache_clear()
    again = gpu()
    again.write_text(device.read_text())
    monkeypatch.setattr(packaged, "FOLDER", path.parent)
    assert ask(again) == ["store"] * 3
    assert "plan: from the store on disk" in str(
        explain("sdpa", QUERY, is_causal=True, polymorphic=True, device=again)
    )
    assert read == []


def test_many_threads_at_once(path, gpu):
    device = gpu()
    cudnn_ops.support.prepare(device)
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(ask(device))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["package"] * 3] * 8
    assert cudnn_ops.cache_info()[1:3] == (0, 3)


def test_a_process_that_loads_a_bundle_of_its_own_has_both(path, gpu, tmp_path):
    device = gpu()
    mine = tmp_path / "mine.bundle"
    exact = cudnn_ops.plan_requests("sdpa", QUERY, is_causal=True, plans="exact", training=False)
    build_bundle(exact, "h200", mine, progress=False)
    cudnn_ops.load_bundle(mine, device=device)
    try:
        assert explain("sdpa", QUERY, is_causal=True, device=device).source == str(mine)
        assert ask(device) == ["package"] * 3
    finally:
        unload_bundle(mine)


# --- what they are not for, silently ----------------------------------------------------


@pytest.mark.parametrize("name", ["cudnn", "frontend", "graphs"])
def test_another_version_builds_its_own(path, gpu, name):
    header, records = parts(path)
    header["versions"][name] = 80000 if name != "graphs" else "0123"
    write(path, header, records)
    assert is_built_silently(gpu())


@pytest.mark.parametrize(
    "changes", [{"driverVer": 12080}, {"multiProcessorCount": 114}, {"regsPerBlock": 32768}]
)
def test_another_gpu_or_driver_builds_its_own(path, gpu, changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device = gpu(**changes)
        answer = explain("conv2d", *CONV, device=device)
        assert (answer.supported, answer.source) == (True, "build")
        assert warmup(requests()[:1], device=device, progress=False).loaded == 0


CONV = (((8, 64, 16, 16), torch.bfloat16), ((64, 64, 3, 3), torch.bfloat16))


def test_the_driver_that_fits_is_taken(path, gpu):
    other = path.parent / packaged.file_name(json.dumps(json.loads(H200) | {"driverVer": 13020}))
    build_bundle(requests()[:1], "h200", other, driver="13.2", progress=False)
    try:
        assert ask(gpu())[0] == "package"
        assert ask(gpu(driverVer=13020))[0] == "package"
    finally:
        unload_bundle(other)


def test_a_package_without_plans(path, gpu, monkeypatch):
    monkeypatch.setattr(packaged, "FOLDER", path.parent / "none")
    assert is_built_silently(gpu())


# --- damage -----------------------------------------------------------------------------


def test_a_damaged_file_is_left_aside_with_a_warning(path, gpu):
    flip(path, 500)
    device = gpu()
    with pytest.warns(UserWarning, match="plans of the package are not used: .* is corrupted"):
        assert ask(device) == ["build"] * 3


def test_a_damaged_plan_is_built_with_a_warning(path, gpu):
    flip(path, path.stat().st_size - 1)
    device = gpu()
    with pytest.warns(UserWarning, match="a plan of the bundle .* is built anew: it is truncated"):
        sources = ask(device)
    assert sorted(set(sources)) == ["build", "package"]


def test_the_package_may_be_another_users(path, gpu):
    path.chmod(0o666)
    path.parent.chmod(0o777)
    assert ask(gpu()) == ["package"] * 3


# --- how they are made ------------------------------------------------------------------


def test_the_list():
    listed = common.common_requests("h200")
    assert len(listed) == len(set(listed))
    assert {request.op for request in listed} == {"sdpa", "sdpa_backward"}
    assert set(common.attention_plans(HEADS, SIZES, True, False, "h200")) <= set(listed)
    assert all("sequences=2" in str(request) for request in listed)  # Sequences::kRagged


@pytest.mark.parametrize("gpu_name", ["h200", "b200", "a100"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_listed_plans_can_be_built_and_kept(gpu_name, is_causal, tmp_path):
    models = common.DECODERS if is_causal else common.ENCODERS
    training = common.DECODER_TRAINING if is_causal else common.ENCODER_TRAINING
    wanted = common.attention_plans(models[0], training[-1], is_causal, True, gpu_name)
    assert set(wanted) <= set(common.common_requests(gpu_name))
    report = build_bundle(wanted, gpu_name, tmp_path / "x", progress=False)
    assert (report.plans, report.refused, report.left_out) == (2, {}, {})


def test_plans_share_their_kernels(tmp_path):
    wanted = common.attention_plans(HEADS, SIZES, True, False, "h200")
    build_bundle(wanted, "h200", tmp_path / "one", progress=False)
    wanted += common.attention_plans(HEADS, common.Sizes(8, 2048), True, False, "h200")
    build_bundle(wanted, "h200", tmp_path / "two", progress=False)
    one, two = ((tmp_path / name).stat().st_size for name in ("one", "two"))
    assert two - one < one / 2


def test_the_command_line(tmp_path, gpu, monkeypatch, capsys):
    monkeypatch.setattr(bundle_command, "common_requests", lambda device: requests()[:1])
    arguments = ["bundle", "--common", "--device", "h200", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert main([*arguments, "--driver", "13.2"]) == 0
    names = [f"sm90-132-cuda{driver}.bundle" for driver in (13000, 13020)]
    for line, name in zip(capsys.readouterr().out.splitlines(), names, strict=True):
        assert line.startswith(f"1 plans in {tmp_path / name}, ")
    monkeypatch.setattr(packaged, "FOLDER", tmp_path)
    assert ask(gpu())[0] == "package"
    for name in names:
        unload_bundle(tmp_path / name)


# --- on a GPU ---------------------------------------------------------------------------

# It does not end as usual: torch's thread for gradients may still wait for the interpreter's lock,
# to let go of a tensor, and where the interpreter is ending by then that aborts the process.
IN_A_NEW_PROCESS = """
import os, sys
from pathlib import Path
import torch, cudnn_ops
from cudnn_ops.plans import packaged
packaged.FOLDER = Path(sys.argv[1])
from tests.test_packaged_plans import check_the_first_calls
check_the_first_calls()
sys.stderr.flush()
os._exit(0)
"""


def check_the_first_calls() -> None:
    """Forward and backward at two lengths, with nothing built."""
    for length in (333, 700):
        heads = HEADS.query
        case = Case(1, heads, heads, length, length, HEADS.size, HEADS.size, is_causal=True)
        grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
        inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
        cases.check_results(case, run(case, inputs, grad_out), inputs, grad_out)
    assert cudnn_ops.cache_info()[1:3] == (0, 2), cudnn_ops.cache_info()


@pytest.mark.gpu
def test_a_new_process_builds_nothing(tmp_path):
    folder = tmp_path / "common_plans"
    folder.mkdir()
    description = cudnn_ops.support.describe_device()
    build_bundle(requests(), "current", folder / packaged.file_name(description), progress=False)
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS, str(folder)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"CUDNN_OPS_CACHE_DIR": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
