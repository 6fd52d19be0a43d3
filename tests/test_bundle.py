"""Bundles: plans built here for a GPU that is elsewhere, and every reason not to use them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cudnn_ops
from cudnn_ops import PlanRequest, build_bundle, load_bundle, plan_requests, unload_bundle, warmup
from cudnn_ops.__main__ import main
from cudnn_ops.plans import bundle as bundle_module
from cudnn_ops.support import explain
from tests.cases import sdpa as cases
from tests.cases.sdpa import Case, run

pytestmark = pytest.mark.usefixtures("fresh_cache")
COMPARED = dict(bundle_module.COMPARED)
H200 = (Path(cudnn_ops.__file__).parent / "support/devices/h200.json").read_text()
CONV = (((8, 64, 16, 16), torch.bfloat16), ((64, 64, 3, 3), torch.bfloat16))
QUERY = ((1, 2, 64, 64), torch.bfloat16)
#: cuDNN supports its forward and not its backward.
WIDE = ((1, 2, 64, 512), torch.bfloat16)


def requests() -> list[PlanRequest]:
    return [
        *plan_requests("sdpa", QUERY, plans="exact"),
        *plan_requests("conv2d", *CONV, training=False),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "plans.bundle"
    report = build_bundle(requests(), "h200", path, progress=False)
    assert (report.plans, report.refused, report.left_out) == (3, {}, {})
    assert report.bytes == path.stat().st_size
    return path


@pytest.fixture
def path(built: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to spoil, unloaded afterwards."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    copy = folder / "plans.bundle"
    shutil.copy2(built, copy)
    yield copy
    unload_bundle(copy)


def ask_all() -> tuple[int, int]:
    """Every plan of the bundle is asked for; how many were built, and loaded."""
    assert explain("sdpa", QUERY, with_lse=True, device="h200").supported
    assert explain("sdpa_backward", QUERY, device="h200").supported
    assert explain("conv2d", *CONV, device="h200").supported
    return cudnn_ops.cache_info()[1:3]


def parts(path: Path) -> tuple[dict, bytes]:
    line, _, rest = path.read_bytes().partition(b"\n")
    size = int(line.split()[-2])
    return json.loads(rest[:size]), rest[size:]


def write(path: Path, header: dict, records: bytes, title: str = "cudnn_ops plan bundle 2") -> None:
    text = json.dumps(header).encode()
    line = f"{title} {len(text)} {hashlib.sha256(text).hexdigest()}\n".encode()
    path.write_bytes(line + text + records)


def change_header(path: Path, change: Callable[[dict], object]) -> None:
    header, records = parts(path)
    change(header)
    write(path, header, records)


# --- what it is for ---------------------------------------------------------------------


def test_a_process_that_loads_a_bundle_builds_none_of_its_plans(path):
    fresh = ask_all()
    assert fresh == (3, 0)
    engines = explain("sdpa_backward", QUERY, device="h200").engine
    cudnn_ops.cache_clear()
    bundle = load_bundle(path, device="h200")
    assert bundle.path == str(path)
    assert bundle.device == "NVIDIA H200"
    assert bundle.bytes == path.stat().st_size
    assert list(bundle.requests) == requests()
    assert cudnn_ops.cache_info().loads == 0  # nothing is read before it is asked for
    assert ask_all() == (0, 3)
    assert explain("sdpa_backward", QUERY, device="h200").engine == engines
    assert explain("sdpa", QUERY, is_causal=True, device="h200").supported
    assert cudnn_ops.cache_info().builds == 1


def test_another_process(path):
    code = f"""
import cudnn_ops
bundle = cudnn_ops.load_bundle({str(path)!r}, device="h200")
print(*cudnn_ops.warmup(bundle.requests, device="h200", progress=False))
"""
    env = os.environ | {"CUDNN_OPS_CACHE_DIR": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0 3 0 {}\n", "")


def test_the_cache_and_the_store_do_not_change_what_is_written(store, tmp_path):
    """Plans that this process has, or the store, are in the bundle like any other."""
    ask_all()
    before = cudnn_ops.cache_info()
    for name in ("first", "second"):
        report = build_bundle(requests(), "h200", tmp_path / name, progress=False)
        assert report.plans == 3
    assert cudnn_ops.cache_info() == before
    assert parts(tmp_path / "first") == parts(tmp_path / "second")
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {"first", "second", "deep"}


def test_a_loaded_bundle_can_be_replaced_and_unloaded(path):
    load_bundle(path, device="h200")
    build_bundle(requests()[:1], "h200", path, progress=False)
    assert ask_all() == (0, 3)  # of the file that was there
    cudnn_ops.cache_clear()
    assert len(load_bundle(path, device="h200").requests) == 1
    assert ask_all() == (2, 1)
    cudnn_ops.cache_clear()
    unload_bundle(path)
    assert ask_all() == (3, 0)


def test_two_bundles(path, tmp_path):
    other = path.parent / "other.bundle"
    causal = plan_requests("sdpa", QUERY, is_causal=True, training=False, plans="exact")
    build_bundle(causal, "h200", other, progress=False)
    load_bundle(path, device="h200")
    load_bundle(other, device="h200")
    assert ask_all() == (0, 3)
    assert warmup(causal, device="h200", progress=False).loaded == 1
    unload_bundle(other)


def test_the_store_comes_first_and_keeps_no_plan_of_a_bundle(path, store):
    load_bundle(path, device="h200")
    assert ask_all() == (0, 3)
    assert cudnn_ops.store_info().files == 0


def test_many_threads_read_one_bundle(path):
    load_bundle(path, device="h200")
    cudnn_ops.set_cache_limit(1)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            for _ in range(5):
                ask_all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cudnn_ops.cache_info().builds == 0
    assert cudnn_ops.cache_info().loads > 3


def test_a_link_to_a_bundle(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    assert load_bundle(link, device="h200").path == str(path)
    assert ask_all() == (0, 3)


# --- what cannot be written -------------------------------------------------------------


def test_what_is_refused_and_what_is_left_out(tmp_path):
    wide = plan_requests("sdpa", WIDE, plans="exact")
    norm = plan_requests("rms_norm", ((8192, 4096), torch.bfloat16), training=False)
    report = build_bundle([*wide, *norm], "h200", tmp_path / "some", progress=False)
    assert report.plans == 1
    ((request, reason),) = report.refused.items()
    assert request.op == "sdpa_backward"
    assert "hidden_dim" in reason
    ((request, reason),) = report.left_out.items()
    assert request.op == "norm"
    failed = r"an engine that cuDNN prefers cannot be built .+: .+ \(CUDNN_STATUS_\w+\)"
    assert re.fullmatch(rf"{failed}|cuDNN cannot store a plan with engine .+", reason)


def test_where_nothing_can_be_written_there_is_no_file(tmp_path):
    backward = plan_requests("sdpa", WIDE, plans="exact")[1:]
    report = build_bundle(backward, "h200", tmp_path / "none", progress=False)
    assert report[:2] == (0, 0)
    assert len(report.refused) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], "h200"), ValueError, "requests is empty"),
        (([PlanRequest((1, 2, 3))], "h200"), ValueError, "no operator of this version"),
        ((None, "h2000"), ValueError, "not one of a100, "),
        ((None, "h200", "13.x"), ValueError, "such as \"13.0\", got '13.x'"),
    ],
)
def test_mistakes(arguments, error, message, tmp_path):
    wanted, device, *driver = arguments
    wanted = requests()[:1] if wanted is None else wanted
    options = {"driver": driver[0]} if driver else {}
    with pytest.raises(error, match=message):
        build_bundle(wanted, device, tmp_path / "x", progress=False, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        build_bundle(requests(), "h200", tmp_path / "no" / "x", progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_current_one(path, tmp_path):
    with pytest.raises(RuntimeError, match="torch sees none"):
        load_bundle(path)
    with pytest.raises(RuntimeError, match="torch sees none"):
        build_bundle(requests(), "current", tmp_path / "x", progress=False)


# --- other GPUs, drivers and versions ---------------------------------------------------


def description(folder: Path, **changes: object) -> Path:
    path = folder / "gpu.json"
    path.write_text(json.dumps(json.loads(H200) | changes))
    return path


@pytest.mark.parametrize("device", ["b200", "a100", "rtx_4090"])
def test_another_gpu(path, device):
    with pytest.raises(RuntimeError, match="was made for NVIDIA H200, and cuDNN does not run") as e:
        load_bundle(path, device=device)
    assert f"on {device} (NVIDIA " in str(e.value)
    assert "its deviceVer is " in str(e.value)
    assert "its multiProcessorCount is " in str(e.value)


def test_an_older_driver(path, tmp_path):
    build_bundle(requests()[:1], "h200", path, driver="13.2", progress=False)
    load_bundle(path, device=description(tmp_path, driverVer=13020))
    with pytest.raises(RuntimeError, match=r"its driver is for CUDA 13\.0, the bundle for 13\.2"):
        load_bundle(path, device="h200")


@pytest.mark.parametrize("version", [91900, 92900])
def test_a_newer_driver(path, tmp_path, monkeypatch, version):
    """It depends on cuDNN's version whether it accepts one."""
    change_header(path, lambda header: header["versions"].update(cudnn=version))
    monkeypatch.setattr(bundle_module._C, "cudnn_version", lambda: version)
    newer = description(tmp_path, driverVer=13020)
    if version > bundle_module.ACCEPTS_NEWER_DRIVERS:
        load_bundle(path, device=newer)
        return
    with pytest.raises(RuntimeError, match=r"its driver is for CUDA 13\.2, the bundle for 13\.0"):
        load_bundle(path, device=newer)


def test_a_description_of_an_older_cudnn_has_fewer_fields(path, tmp_path, monkeypatch):
    change_header(path, lambda header: header["versions"].update(cudnn=92900))
    monkeypatch.setattr(bundle_module._C, "cudnn_version", lambda: 92900)
    with pytest.raises(RuntimeError, match="its memoryBusWidth is 5120, the bundle's 6144"):
        load_bundle(path, device=description(tmp_path, memoryBusWidth=5120))
    fields = json.loads(H200)
    del fields["memoryBusWidth"]
    change_header(path, lambda header: header.update(gpu=json.dumps(fields)))
    load_bundle(path, device="h200")


def test_what_cudnn_does_not_compare_may_differ(path, tmp_path):
    other = description(tmp_path, deviceName="another", l2CacheSize=1 << 20, totalGlobalMem=1 << 30)
    load_bundle(path, device=other)
    assert explain("sdpa", QUERY, with_lse=True, device=other).supported
    assert cudnn_ops.cache_info()[1:3] == (0, 1)


@pytest.fixture
def unchecked(monkeypatch):
    """Only cuDNN itself compares GPUs."""
    with monkeypatch.context() as patch:
        patch.setattr(bundle_module, "COMPARED", {})
        yield


def is_accepted(path: Path, device: Path) -> bool:
    """Whether cuDNN reads the bundle's plan of a convolution there, and does not build it."""
    cudnn_ops.cache_clear()
    load_bundle(path, device=device)
    explain("conv2d", *CONV, device=device)
    return cudnn_ops.cache_info().loads == 1


@pytest.mark.filterwarnings("ignore:cudnn_ops. a plan of the bundle")
def test_what_cudnn_compares(path, tmp_path, unchecked):
    """Each field of a description, changed by itself: our list is cuDNN's."""
    compared = set()
    for name, value in json.loads(H200).items():
        if isinstance(value, list):
            changed: object = [number + 1 for number in value]
        else:
            step = -10 if name == "driverVer" else 10  # a newer one may be accepted
            changed = f"{value}x" if isinstance(value, str) else value + step
        if not is_accepted(path, description(tmp_path, **{name: changed})):
            compared.add(name)
    version = cudnn_ops._C.cudnn_version()
    assert compared == {name for name, since in COMPARED.items() if version >= since}
    newer = is_accepted(path, description(tmp_path, driverVer=13020))
    assert newer == (version >= bundle_module.ACCEPTS_NEWER_DRIVERS)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cudnn", 92000, r"was made with cuDNN 9\.20\.0, and this is 9\.\d+\.\d+; make it again"),
        ("frontend", 11000, r"was made with cuDNN Frontend 1\.10\.0, and this is 1\."),
        ("graphs", "0123", r"by another version of cudnn_ops \(graphs 0123, here \w{16}\)"),
    ],
)
def test_other_versions(path, name, value, message):
    change_header(path, lambda header: header["versions"].update({name: value}))
    with pytest.raises(RuntimeError, match=message):
        load_bundle(path, device="h200")


def test_a_plan_that_cudnn_does_not_accept_is_built_with_a_warning(path, tmp_path, unchecked):
    other = description(tmp_path, multiProcessorCount=114)
    load_bundle(path, device=other)
    with pytest.warns(UserWarning, match="is built anew: cuDNN cannot read this plan"):
        assert explain("conv2d", *CONV, device=other).supported
    assert cudnn_ops.cache_info()[1:3] == (1, 0)


def test_all_live_gpus_like_the_one_that_is_asked_for(path, monkeypatch):
    names = ["NVIDIA H200", "NVIDIA T4", "NVIDIA H200"]
    gpus = [
        SimpleNamespace(name=n, major=9, minor=0, multi_processor_count=132, total_memory=1)
        for n in names
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(bundle_module, "resolve_device", lambda device: (2, "current"))
    live = {2: H200}
    monkeypatch.setattr(bundle_module._C, "describe_device", live.__getitem__)
    served = []
    monkeypatch.setattr(bundle_module._C, "set_bundle", lambda *arguments: served.append(arguments))
    load_bundle(path)
    ((name, file, label, gpu, devices, described, plans, pieces),) = served
    assert (name, label, gpu, devices, described) == (str(path), str(path), H200, [0, 2], "")
    assert len(plans) == len(pieces) == 3
    assert max(sum(record[-2:]) for record in pieces) == os.fstat(file).st_size
    os.close(file)
    live[2] = json.dumps(json.loads(H200) | {"multiProcessorCount": 114})
    with pytest.raises(RuntimeError, match=r"on cuda:2 \(NVIDIA H200\): its multiProcessorCount"):
        load_bundle(path)


# --- damage -----------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: cut(path, 0), "is not a bundle of plans"),
    "another file": (lambda path: path.write_text("#!/bin/sh\n" * 99), "is not a bundle of plans"),
    "no line": (lambda path: cut(path, 40), "is truncated: it ends within its header"),
    "within the header": (lambda path: cut(path, 300), "is truncated: it ends within its header"),
    "within the plans": (lambda path: cut(path, path.stat().st_size - 1), "is truncated: it has"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"!"), "is corrupted: it has"),
    "title": (lambda path: flip(path, 5), "is not a bundle of plans"),
    "size": (lambda path: flip(path, len("cudnn_ops plan bundle 2 ")), "is truncated|is corrupted"),
    "header": (lambda path: flip(path, 500), "is corrupted: its checksum differs"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(path, damage):
    spoil, message = DAMAGES[damage]
    spoil(path)
    with pytest.raises(ValueError, match=message):
        load_bundle(path, device="h200")
    assert ask_all() == (3, 0)


def test_another_format(path):
    header, records = parts(path)
    write(path, header, records, "cudnn_ops plan bundle 7")
    with pytest.raises(RuntimeError, match="is of format 7 and this version of cudnn_ops reads 2"):
        load_bundle(path, device="h200")


@pytest.mark.parametrize("position", [0.0, 0.1, 0.9])
def test_a_damaged_plan_is_built_with_one_warning(path, position):
    _, records = parts(path)
    start = path.stat().st_size - len(records)
    for plan in parts(path)[0]["plans"][:2]:
        offsets, sizes = plan["pieces"][::2], plan["pieces"][1::2]
        number = int(position * len(sizes))
        flip(path, start + offsets[number] + int(position * sizes[number]))
    load_bundle(path, device="h200")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ask_all() == (2, 1)
    (warning,) = [str(w.message) for w in caught if str(w.message).startswith("cudnn_ops:")]
    assert f"a plan of the bundle {path} is built anew: it is truncated or corrupted" in warning


def test_a_file_that_shrinks_after_it_was_loaded(path):
    load_bundle(path, device="h200")
    cut(path, path.stat().st_size // 2)
    with pytest.warns(UserWarning, match="is built anew: it is truncated"):
        builds, loads = ask_all()
    assert builds > 0
    assert builds + loads == 3


def test_a_plan_under_the_name_of_another_is_not_used(path):
    def swap(header: dict) -> None:
        first, second, _ = header["plans"]
        first["name"], second["name"] = second["name"], first["name"]

    change_header(path, swap)
    load_bundle(path, device="h200")
    with pytest.warns(UserWarning, match="is built anew"):
        assert ask_all() == (2, 1)


# --- who may write to it ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_a_file_that_others_can_write_to(path, mode):
    path.chmod(mode)
    with pytest.raises(PermissionError, match=r"plans are code.*plans\.bundle can be written by"):
        load_bundle(path, device="h200")
    path.chmod(0o644)
    load_bundle(path, device="h200")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_to(path, mode):
    path.parent.chmod(mode)
    with pytest.raises(PermissionError, match=f"chmod go-w {path.parent}` forbids it"):
        load_bundle(path, device="h200")
    path.parent.chmod(0o755)
    load_bundle(path, device="h200")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_bundle_of_another_user(path, what):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path if what == "file" else path.parent, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        load_bundle(path, device="h200")


def test_what_is_no_file(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_bundle(tmp_path / "nothing", device="h200")
    with pytest.raises(ValueError, match="it is not a file"):
        load_bundle(path.parent, device="h200")


# --- the command line -------------------------------------------------------------------


def test_the_command_line(path, tmp_path, capsys):
    shapes, out = tmp_path / "shapes.json", path.parent / "mine.bundle"
    cudnn_ops.save_requests(requests(), shapes)
    arguments = ["bundle", "--device", "H200", "--from", str(shapes), "--out", str(out)]
    assert main([*arguments, "--threads", "2"]) == 0
    assert capsys.readouterr().out == f"3 plans in {out}, {out.stat().st_size:,} bytes\n"
    load_bundle(out, device="h200")
    assert ask_all() == (0, 3)
    assert main([*arguments, "--driver", "13.2"]) == 0
    with pytest.raises(RuntimeError, match=r"CUDA 13\.0, the bundle for 13\.2"):
        load_bundle(out, device="h200")
    unload_bundle(out)


def test_the_command_line_says_what_is_refused(tmp_path, capsys):
    shapes, out = tmp_path / "shapes.json", tmp_path / "x.bundle"
    entries = [
        {"op": "sdpa", "q": WIDE_JSON, "plans": "exact"},
        {"op": "rms_norm", "q": [[8192, 4096], "bf16"], "training": False},
    ]
    shapes.write_text(json.dumps(entries))
    arguments = ["bundle", "--device", "h200", "--from", str(shapes), "--out", str(out)]
    assert main(arguments) == 1
    refused, left_out, written = capsys.readouterr().out.splitlines()
    assert refused.startswith("refused: sdpa_backward(")
    assert "hidden_dim" in refused
    assert left_out.startswith("left out: norm(")
    assert written == f"1 plans in {out}, {out.stat().st_size:,} bytes"
    shapes.write_text(json.dumps([{"op": "sdpa_backward", "q": WIDE_JSON, "plans": "exact"}]))
    out.unlink()
    assert main(arguments) == 1
    assert capsys.readouterr().out.endswith(f"no plan could be written: there is no {out}\n")
    assert not out.exists()


WIDE_JSON = [[1, 2, 64, 512], "bfloat16"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "is not JSON"),
        ("[1, 2", "is not JSON"),
        ("3", "is not a list of requests or shapes"),
        ("{}", "of another version of cudnn_ops"),
        ("[]", "requests is empty"),
    ],
)
def test_the_command_line_refuses(content, message, tmp_path, capsys):
    shapes = tmp_path / "shapes.json"
    if content is not None:
        shapes.write_text(content)
    arguments = ["bundle", "--device", "h200", "--from", str(shapes)]
    assert main([*arguments, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# --- on a GPU ---------------------------------------------------------------------------

WITHOUT_A_GPU = """
import sys, torch
from cudnn_ops.__main__ import main
assert not torch.cuda.is_available()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["auto", "polymorphic"])
def test_plans_built_without_the_gpu_run_on_it(policy, tmp_path):
    case = Case(2, 8, 2, 300, 300, 128, 128, is_causal=True)
    grad_out = cases.make_grad_out(case, torch.bfloat16, "cuda")
    shapes, gpu, out = (tmp_path / name for name in ("shapes.json", "gpu.json", "plans.bundle"))
    gpu.write_text(cudnn_ops.support.describe_device())
    with cudnn_ops.using_plan_policy(policy):
        with cudnn_ops.record_shapes() as recorded:
            inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
            run(case, inputs, grad_out)
        cudnn_ops.save_requests(recorded, shapes)
        command = ["bundle", "--device", gpu, "--from", shapes, "--out", out]
        subprocess.run(
            [sys.executable, "-c", WITHOUT_A_GPU, *map(str, command)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            check=True,
        )
        cudnn_ops.cache_clear()
        assert len(load_bundle(out).requests) == 2
        try:
            fresh = cases.make_inputs(case, torch.bfloat16, "cuda", seed=9)
            cases.check_results(case, run(case, fresh, grad_out), fresh, grad_out)
            assert cudnn_ops.cache_info()[1:3] == (0, 2)
        finally:
            unload_bundle(out)


@pytest.mark.gpu
def test_a_bundle_of_the_current_gpu_has_norms_too(path):
    norm = plan_requests("rms_norm", ((8192, 4096), torch.bfloat16))
    report = build_bundle([*requests(), *norm], "current", path, progress=False)
    assert (report.refused, report.left_out) == ({}, {})
    bundle = load_bundle(path)
    assert warmup(bundle.requests, progress=False) == (0, len(bundle.requests), 0, {})
