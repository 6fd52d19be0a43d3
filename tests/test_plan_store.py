"""The plans on disk: who may read them, what happens to those that are damaged, and when."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudnn_ops
from cudnn_ops import __main__ as command_line
from cudnn_ops import support
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run

pytestmark = pytest.mark.usefixtures("fresh_cache")
ROOT = Path(__file__).parents[1]
CMAKE = (ROOT / "CMakeLists.txt").read_text()


def plan(length: int = 64, device: str | Path = "h200"):
    return explain("sdpa", ((1, 2, length, 64), torch.bfloat16), device=device)


def plan_again(length: int = 64) -> str:
    """Where a process that has no plan yet takes this one from."""
    cudnn_ops.cache_clear()
    plan(length)
    info = cudnn_ops.cache_info()
    assert info.loads + info.builds == 1
    return "store" if info.loads else "build"


@pytest.fixture
def warnings_so_far():
    """Reads what the operators' library has warned of since the last call, as Python warns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def read() -> list[str]:
            ours = [w for w in caught if str(w.message).startswith("cudnn_ops:")]
            caught.clear()
            assert all(w.category is UserWarning for w in ours)
            return [str(w.message) for w in ours]

        yield read


def files(store: Path) -> list[Path]:
    return sorted(store.glob("*.plan"))


def in_another_process(store: Path, code: str, **kwargs) -> subprocess.Popen:
    code = f"""
import torch, cudnn_ops
from cudnn_ops.support import explain
def plan(length):
    return explain("sdpa", ((1, 2, length, 64), torch.bfloat16), device="h200")
{code}"""
    env = os.environ | {"CUDNN_OPS_CACHE_DIR": str(store)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True, **kwargs
    )


def test_a_plan_is_stored_once_and_read_by_others(store):
    first = plan()
    assert plan_again() == "store"
    assert first.source == "build"
    assert plan() == replace(first, source="store")
    assert len(files(store)) == 1
    child = in_another_process(store, "plan(64); plan(128); print(*cudnn_ops.cache_info()[1:3])")
    assert child.communicate()[0] == "1 1\n"
    assert plan_again(128) == "store"


def test_the_folder_is_private(store):
    plan()
    assert store.stat().st_mode & 0o777 == 0o700
    assert files(store)[0].stat().st_mode & 0o777 == 0o600


def test_off(store):
    cudnn_ops.set_store(None)
    plan()
    assert plan_again() == "build"
    assert not store.exists()
    assert cudnn_ops.store_info().folder == ""


def test_info_clear_and_the_command_line(store, capsys):
    assert cudnn_ops.store_info()[2:4] == (0, 0)
    plan(64)
    plan(128)
    info = cudnn_ops.store_info()
    assert (info.folder, info.refusal, info.files) == (str(store), "", 2)
    assert info.bytes == sum(file.stat().st_size for file in files(store))
    assert command_line.main(["cache", "info"]) == 0
    assert f"folder: {store}\nplans:  2\nbytes:  {info.bytes:,} of" in capsys.readouterr().out
    assert command_line.main(["cache", "clear"]) == 0
    assert "2 plans deleted" in capsys.readouterr().out
    assert files(store) == []
    cudnn_ops.set_store(None)
    assert command_line.main(["cache", "info"]) == 0
    assert "no store" in capsys.readouterr().out


def test_the_default_folder_is_the_users():
    code = "import cudnn_ops; print(cudnn_ops.store_info().folder)"
    env = {name: value for name, value in os.environ.items() if name != "CUDNN_OPS_CACHE_DIR"}
    env["XDG_CACHE_HOME"] = "/somewhere"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "/somewhere/cudnn_ops"


def test_a_negative_limit_is_refused(store):
    with pytest.raises(ValueError, match="number of bytes"):
        cudnn_ops.set_store(store, limit=-1)


@pytest.mark.parametrize("part", ["gpu", "sm", "key"])
def test_other_gpus_and_other_shapes_have_plans_of_their_own(store, part, tmp_path):
    plan()
    if part == "key":
        plan(128)
    else:
        description = json.loads((Path(support.__file__).parent / "devices/h200.json").read_text())
        change = {"gpu": ("deviceName", "another"), "sm": ("multiProcessorCount", 100)}[part]
        assert change[0] in description
        path = tmp_path / "gpu.json"
        path.write_text(json.dumps(description | dict([change])))
        plan(device=path)
    assert cudnn_ops.cache_info().loads == 0
    assert len(files(store)) == 2


# --- damage -----------------------------------------------------------------------------


def damage_truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def damage_empty(file: Path) -> None:
    os.truncate(file, 0)


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def damage_append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"!")


def damage_foreign(file: Path) -> None:
    file.write_bytes(b"#!/bin/sh\necho mine\n" * 1000)


def damage_version(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8] += 1  # the format, after 8 bytes of magic
    file.write_bytes(data)


def damage_sizes(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[12:24] = b"\xff" * 12
    file.write_bytes(data)


def damage_other_plan(file: Path) -> None:
    """The plan of another shape under this one's name."""
    before = set(file.parent.iterdir())
    plan(192)
    (other,) = set(file.parent.iterdir()) - before
    other.rename(file)


def damage_writable(file: Path) -> None:
    file.chmod(0o666)


def damage_link(file: Path) -> None:
    target = file.parent.parent / "elsewhere"
    file.rename(target)
    file.symlink_to(target)


def damage_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES = [
    damage_truncate,
    damage_empty,
    damage_flip,
    damage_append,
    damage_foreign,
    damage_version,
    damage_sizes,
    damage_other_plan,
    damage_writable,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_used_is_built_anew_with_one_warning(store, damage, warnings_so_far):
    plan()
    damage(files(store)[0])
    assert plan_again() == "build"
    (warning,) = warnings_so_far()
    assert "is built anew" in warning
    assert plan_again() == "store"  # the good one has taken its place
    damage(files(store)[0])
    assert plan_again() == "build"
    assert warnings_so_far() == []


@pytest.mark.parametrize("damage", [damage_link, damage_folder])
def test_what_is_no_file_is_left_aside(store, damage):
    plan()
    damage(files(store)[0])
    assert plan_again() == "build"


def test_a_file_of_another_user_is_not_used(store, warnings_so_far):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    plan()
    os.chown(files(store)[0], 12345, 12345)
    assert plan_again() == "build"
    assert "belongs to another user" in warnings_so_far()[0]


def test_a_filter_makes_an_error_of_a_warning(store):
    plan()
    damage_flip(files(store)[0])
    cudnn_ops.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="is built anew"):
            plan()
    assert plan_again() == "build"


def test_no_source_warns_past_python():
    sources = {path.name: path.read_text() for path in ROOT.glob("csrc/**/*.cpp")}
    assert [name for name, text in sources.items() if "TORCH_WARN" in text] == ["warn.cpp"]


# --- which graphs a plan is of ----------------------------------------------------------


def hash_of(sources: list[Path], folder: Path) -> str:
    """What the build writes into the library for these sources."""
    header = folder / "graph_hash.h"
    script = ROOT / "csrc/cmake/hash_graphs.cmake"
    joined = "|".join(map(str, sources))
    command = ["cmake", f"-DOUTPUT={header}", f"-DSOURCES={joined}", "-P", str(script)]
    subprocess.run(command, check=True)
    return header.read_text().split('"')[1]


def test_a_plan_is_stored_for_the_sources_of_its_graph(store, tmp_path):
    plan()
    patterns = re.search(r"file\(GLOB_RECURSE graph_sources CONFIGURE_DEPENDS (.*?)\)", CMAKE, re.S)
    folders = [pattern.rpartition("/") for pattern in patterns[1].split()]
    sources = [path for folder, _, name in folders for path in (ROOT / folder).rglob(name)]
    names = {path.name for path in sources}
    assert {"attention_graph.cpp", "attention_params.h", "plan_build.cpp", "frontend.h"} <= names
    known = hash_of(sources, tmp_path)
    assert f"graphs {known}, gpu".encode() in files(store)[0].read_bytes()
    for path in sources:
        copy = tmp_path / path.name
        copy.write_bytes(path.read_bytes() + b" ")
        changed = [copy if other == path else other for other in sources]
        assert hash_of(changed, tmp_path) != known


def test_files_of_another_container_are_left_alone(store):
    """It shares the folder and has a process of the same number, which writes a plan just now."""
    plan()
    others = [store / f".writing-{os.getpid()}-{count}" for count in range(200)]
    for file in others:
        file.write_bytes(b"half a plan")
    plan(128)
    assert len(files(store)) == 2
    assert all(file.exists() for file in others)


# --- hostile or useless folders ---------------------------------------------------------


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(store, mode, warnings_so_far):
    plan()
    store.chmod(mode)
    assert plan_again() == "build"
    assert plan_again() == "build"
    (warning,) = warnings_so_far()
    assert "other users can write to it" in warning
    assert "other users" in cudnn_ops.store_info().refusal
    assert cudnn_ops.store_clear() == 0
    before = files(store)
    plan(128)
    assert files(store) == before
    store.chmod(0o700)
    assert plan_again() == "store"


def test_a_folder_of_another_user_is_refused(store, warnings_so_far):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    plan()
    os.chown(store, 12345, 12345)
    assert plan_again() == "build"
    assert "belongs to another user" in warnings_so_far()[0]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/proc/cudnn_ops", "cannot be stored"), ("file/store", "not used"), ("file", "not a folder")],
)
def test_a_folder_that_cannot_be_made(folder, reason, tmp_path, warnings_so_far):
    (tmp_path / "file").write_text("")
    cudnn_ops.set_store(tmp_path / folder)
    assert plan_again() == "build"
    assert plan_again() == "build"
    cudnn_ops.set_store(None)
    (warning,) = warnings_so_far()
    assert reason in warning


def test_a_full_disk(store):
    """No file may grow past 20 kB: the write of a plan fails halfway."""
    child = in_another_process(
        store,
        """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
assert plan(64).supported and plan(128).supported
print(*cudnn_ops.cache_info()[1:3], cudnn_ops.store_info().files)
""",
        stderr=subprocess.PIPE,
    )
    out, err = child.communicate()
    assert out == "2 0 0\n", err
    assert err.count("cannot be stored") == 1
    assert list(store.iterdir()) == []


def test_the_least_recently_used_plans_go_first(store):
    plan(64)
    size = files(store)[0].stat().st_size
    cudnn_ops.set_store(store, limit=int(size * 3.5))
    for length in (128, 192):
        plan(length)
        time.sleep(0.02)
    assert plan_again(64) == "store"  # used just now: 128 is the oldest
    time.sleep(0.02)
    plan(256)
    assert len(files(store)) == 3
    assert cudnn_ops.store_info().bytes <= cudnn_ops.store_info().limit
    assert [plan_again(length) for length in (64, 192, 256)] == ["store"] * 3
    assert plan_again(128) == "build"
    cudnn_ops.set_store(store, limit=0)
    plan(320)
    assert files(store) == []


# --- many processes ---------------------------------------------------------------------


def test_killed_while_writing(store, warnings_so_far):
    """Whenever it happens, what is left can be read or is left aside."""
    code = """
print("ready", flush=True)
while True:
    for length in (64, 128):
        plan(length)
    cudnn_ops.store_clear()
    cudnn_ops.cache_clear()
"""
    rng = random.Random(0)
    for _ in range(6):
        child = in_another_process(store, code)
        assert child.stdout.readline() == "ready\n"
        time.sleep(1 + rng.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        for length in (64, 128):
            plan_again(length)
            assert plan_again(length) == "store"
    assert warnings_so_far() == []
    # What was being written lies beside the plans until it is old, and disturbs nobody.
    for number in range(3):
        left = store / f".writing-99999-{number}"
        left.write_bytes(b"half a plan")
        os.utime(left, (0, 0))
    plan(192)
    assert not list(store.glob(".writing-99999-*"))


def test_eight_processes_at_once(store):
    code = """
answers = [plan(length) for length in (64, 128, 64)]
assert all(answer.supported for answer in answers)
print(cudnn_ops.cache_info().builds + cudnn_ops.cache_info().loads)
"""
    children = [in_another_process(store, code, stderr=subprocess.PIPE) for _ in range(8)]
    for child in children:
        out, err = child.communicate()
        assert out == "2\n", err
        assert "cudnn_ops:" not in err
    assert len(files(store)) == len(list(store.iterdir())) == 2
    assert plan_again(64) == plan_again(128) == "store"


# --- on a GPU ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["exact", "polymorphic"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_stored_plans_give_the_same_results(store, policy, layout):
    case = Case(2, 8, 2, 300, 300, 128, 128, is_causal=True, layout=layout)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    with cudnn_ops.using_plan_policy(policy):
        cases.check_results(case, run(case, inputs, grad_out), inputs, grad_out)
        assert cudnn_ops.cache_info()[1:3] == (2, 0)
        cudnn_ops.cache_clear()
        fresh = cases.make_inputs(case, torch.bfloat16, "cuda", seed=9)
        cases.check_results(case, run(case, fresh, grad_out), fresh, grad_out)
        assert cudnn_ops.cache_info()[1:3] == (0, 2)


@pytest.mark.gpu
def test_stored_plans_in_a_cuda_graph(store):
    case = Case(2, 4, 2, 96, 96, 64, 64, is_causal=True)
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    expected = torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
    cudnn_ops.cache_clear()
    torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
    assert cudnn_ops.cache_info().loads == 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.cudnn_ops.sdpa(*inputs, **case.kwargs())
    cudnn_ops.cache_clear()
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)
