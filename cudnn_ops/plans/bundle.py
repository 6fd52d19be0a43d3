"""Bundles: the plans of a run in one file, built on any machine for a GPU that a file describes.

The file is a line of text (``cudnn_ops plan bundle``, its format, the header's size in bytes and
SHA-256), a header in JSON, and pieces, of which the plans' records are put together
(``graph/plan_record.h``), each with a checksum of its own. Most of a record is a kernel, as text;
plans that differ in their sizes alone have the same one, which is a piece that they share. Loading
reads the header alone; a plan is read when a call asks for it, at about 2 ms.

A plan is code that will run on the GPU, so a bundle that other users can write to is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cudnn_ops import _C, support
from cudnn_ops.plans.files import replacing
from cudnn_ops.plans.warmup import PlanRequest, distinct, in_threads, resolve_device

_TITLE = b"cudnn_ops plan bundle"
_FORMAT = 2
_MOST_LINE_BYTES = 200
#: Kernels within a record: nothing else in it is so long without a quote.
_KERNEL = re.compile(rb"[A-Za-z0-9+/=]{4096,}")
_AGAIN = "make it again with `python -m cudnn_ops bundle`"

#: What cuDNN compares before it accepts a serialized plan, as its descriptions of GPUs name it, and
#: the version that began to (tests/test_bundle.py asks it). Not the clocks, the name, or the sizes
#: of memory and of the L2 cache.
COMPARED = {
    "deviceVer": 0,
    "driverVer": 0,
    "multiProcessorCount": 0,
    "maxGridSize": 0,
    "maxBlockSize": 0,
    "regsPerBlock": 0,
    "maxSharedMemoryPerBlock": 0,
    "maxSharedMemoryPerBlockOptin": 0,
    "reservedSharedMemoryPerBlock": 0,
    "maxRegistersPerSM": 0,
    "maxThreadsPerBlock": 0,
    "maxThreadsPerSM": 0,
    "memoryBusWidth": 92700,
}
#: The version of cuDNN that began to accept drivers for a newer CUDA than the plan's.
ACCEPTS_NEWER_DRIVERS = 92300


class BundleReport(NamedTuple):
    """Result of :func:`build_bundle`."""

    plans: int
    """Plans in the bundle."""
    bytes: int
    """Size of the file; 0 if no plan could be written, and there is no file."""
    refused: dict[PlanRequest, str]
    """Plans that cuDNN does not support on this GPU, with its reason."""
    left_out: dict[PlanRequest, str]
    """Plans that cuDNN supports and that cannot be stored, with the reason: the process that calls
    them builds them."""


@dataclass(frozen=True)
class PlanBundle:
    """A bundle that :func:`load_bundle` has loaded."""

    path: str
    """The file, without links."""
    device: str
    """The name of the GPU that it was built for."""
    requests: tuple[PlanRequest, ...]
    """Its plans. ``warmup(bundle.requests)`` loads them all at once, before a CUDA graph is
    captured, say."""
    bytes: int
    """Size of the file."""


def build_bundle(
    requests: Iterable[PlanRequest],
    device: str | Path,
    path: str | os.PathLike[str],
    *,
    driver: str | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> BundleReport:
    """Builds plans for a GPU, which need not be there, and writes them to one file.

    The file serves processes with the same versions of cudnn_ops and cuDNN, on GPUs that cuDNN
    takes for the same one: those with the same compute capability, number of multiprocessors and
    limits, under a driver for the same version of CUDA or, from cuDNN 9.23 on, for a newer one. The
    plan cache is neither asked nor
    changed; the store is both.

    Args:
        requests: the result of :func:`record_shapes`, :func:`plan_requests` or
            :func:`load_requests`.
        device: the GPU: a name of :func:`cudnn_ops.support.devices` in any case, the path of a
            description, or ``"current"``.
        path: the file, which only this user can read and write; one that is there is replaced.
        driver: the version of CUDA that the driver there is for, such as ``"13.2"``: what
            ``nvidia-smi`` shows as CUDA Version. None stands for that of the description.
        threads: how many plans are built at once; None stands for the number of CPUs, at most 8.
        progress: whether to show a progress bar on the terminal.

    Returns:
        How many plans were written, and which were not.

    Raises:
        ValueError: no requests; requests of another version of cudnn_ops; an unknown device;
            a driver that is no version.
        RuntimeError: libcudnn cannot be loaded, there is no live GPU, or cuDNN failed.
        OSError: the file cannot be written.

    Example:
        >>> import torch, cudnn_ops, tempfile
        >>> q = ((1, 2, 64, 64), torch.bfloat16)
        >>> requests = cudnn_ops.plan_requests("sdpa", q, training=False, plans="exact")
        >>> path = tempfile.mkdtemp() + "/plans.bundle"
        >>> cudnn_ops.build_bundle(requests, "h200", path, progress=False).plans
        1
    """
    todo = distinct(requests)
    if not todo:
        raise ValueError("requests is empty: a bundle needs at least one plan")
    path = Path(path).expanduser().absolute()
    if not path.parent.is_dir():  # said before minutes of building, not after
        raise FileNotFoundError(f"{path.parent} is not a folder")
    index, description = described(device, driver)
    refused: dict[PlanRequest, str] = {}
    left_out: dict[PlanRequest, str] = {}
    names: dict[PlanRequest, str] = {}
    with tempfile.TemporaryDirectory(prefix="cudnn_ops-bundle-") as folder:

        def make(request: PlanRequest) -> tuple[bool, str, str]:
            if index is None:
                return _C.write_plan(request.words, description, folder)
            with torch.cuda.device(index):
                # Some engines load their kernels when they are built, into the thread's context: a
                # new thread has none before it calls CUDA's runtime.
                torch.cuda.current_stream().query()
                return _C.write_plan(request.words, description, folder)

        for request, made in in_threads(make, todo, threads=threads, progress=progress):
            supported, reason, names[request] = made
            if reason:
                (left_out if supported else refused)[request] = reason
        written = [request for request in todo if names[request]]
        records = [(request, names[request]) for request in written]
        size = _write(path, description, Path(folder), records) if records else 0
    return BundleReport(len(records), size, refused, left_out)


def described(device: str | Path, driver: str | None) -> tuple[int | None, str]:
    """The index of the live device, or None, and the description of the GPU with that driver."""
    description = support.prepare(device)
    index = None
    if description == "current":
        index = torch.cuda.current_device()
        description = _C.describe_device(index)
    if driver is not None:
        fields = json.loads(description) | {"driverVer": _driver_version(driver)}
        description = json.dumps(fields)
    return index, description


def _driver_version(text: str) -> int:
    """``"13.2"`` as 13020, which is how CUDA counts."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and (minor or "0").isdecimal()):
        raise ValueError(f'driver must be a version of CUDA, such as "13.0", got {text!r}')
    return int(major) * 1000 + int(minor or 0) * 10


def _versions() -> dict[str, Any]:
    """What a plan is valid for, beside its GPU."""
    built = _C.versions()
    return {
        "cudnn": _C.cudnn_version(),
        "frontend": built["frontend_headers"],
        "graphs": built["graphs"],
    }


def _write(
    path: Path, description: str, folder: Path, records: list[tuple[PlanRequest, str]]
) -> int:
    plans, offsets, size = [], {}, 0
    for request, name in records:
        pieces: list[int] = []
        for piece in _pieces((folder / name).read_bytes()):
            if piece not in offsets:
                offsets[piece] = size
                size += len(piece)
            pieces += offsets[piece], len(piece)
        plans.append({"name": name, "pieces": pieces, "words": request.words})
    content = {"versions": _versions(), "gpu": description, "bytes": size, "plans": plans}
    header = json.dumps(content).encode()
    title = f" {_FORMAT} {len(header)} {hashlib.sha256(header).hexdigest()}\n".encode()
    with replacing(path) as file:
        file.write(_TITLE + title + header)
        for piece in offsets:
            file.write(piece)
        return file.tell()


def _pieces(record: bytes) -> list[bytes]:
    """A record in parts, so that each kernel is a part by itself."""
    cuts = [cut for kernel in _KERNEL.finditer(record) for cut in kernel.span()]
    ends = itertools.pairwise([0, *cuts, len(record)])
    return [record[begin:end] for begin, end in ends if end > begin]


def load_bundle(
    path: str | os.PathLike[str], *, device: str | Path | int | torch.device = "current"
) -> PlanBundle:
    """Serves plans from a bundle from now on, to all threads of this process.

    A call whose plan is neither in the cache nor in the store reads it from the bundle, in about
    2 ms, and :func:`cache_info` counts a load. A plan that turns out to be damaged is built, with
    one warning. A bundle that was loaded from the same path before is replaced.

    Args:
        path: a file that :func:`build_bundle` wrote. It and its folder must belong to this user or
            to root, and other users must not be able to write to either.
        device: ``"current"`` or a CUDA device: the bundle serves this GPU and all GPUs like it. Or
            a described GPU as in :func:`cudnn_ops.support.explain`, for questions about it and
            :func:`warmup` on a machine without one.

    Returns:
        What is in it.

    Raises:
        PermissionError: other users can write to the file or its folder, or it is theirs.
        ValueError: the file is not a bundle, or it is truncated or corrupted; an unknown device.
        RuntimeError: it was made for another GPU or driver, or by another version of cuDNN or
            cudnn_ops; there is no live GPU.
        OSError: the file cannot be read.

    Example:
        >>> import torch, cudnn_ops, tempfile
        >>> q = ((1, 2, 64, 64), torch.bfloat16)
        >>> requests = cudnn_ops.plan_requests("sdpa", q, training=False, plans="exact")
        >>> path = tempfile.mkdtemp() + "/plans.bundle"
        >>> report = cudnn_ops.build_bundle(requests, "h200", path, progress=False)
        >>> bundle = cudnn_ops.load_bundle(path, device="h200")
        >>> bundle.device, len(bundle.requests)
        ('NVIDIA H200', 1)
        >>> cudnn_ops.unload_bundle(path)
    """
    index, description = resolve_device(device)
    return serve(Path(path).expanduser().resolve(), index, description, str(device))


def serve(
    path: Path, index: int | None, description: str, device: str, *, is_ours: bool = False
) -> PlanBundle:
    """:func:`load_bundle` for a live device, or for the one that a description describes.

    ``is_ours`` says that the file is the package's own, which whoever runs its code trusts.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if not is_ours:
            _require_private(path, status)
        header, begin = _read_header(path, file, status.st_size)
        gpu, plans = header["gpu"], header["plans"]
        _require_versions(path, header["versions"])
        if index is None:
            _require_gpu(path, gpu, description, device)
            devices = []
        else:
            _require_gpu(path, gpu, _C.describe_device(index), f"cuda:{index}")
            devices, description = _like(index), ""
        names = [plan["name"] for plan in plans]
        pieces = [_moved(plan["pieces"], begin) for plan in plans]
        label = "package" if is_ours else str(path)
        _C.set_bundle(str(path), file, label, gpu, devices, description, names, pieces)
    except BaseException:
        os.close(file)
        raise
    requests = tuple(PlanRequest(tuple(plan["words"])) for plan in plans)
    return PlanBundle(str(path), _name(gpu), requests, status.st_size)


def _moved(pieces: list[int], by: int) -> list[int]:
    """Offset and size of each piece, the offsets counted from elsewhere."""
    return [number if i % 2 else number + by for i, number in enumerate(pieces)]


def unload_bundle(path: str | os.PathLike[str]) -> None:
    """Serves no more plans from a bundle. Those in the cache stay there.

    Args:
        path: as it was given to :func:`load_bundle`. Nothing happens if no such bundle is loaded.

    Example:
        >>> import cudnn_ops
        >>> cudnn_ops.unload_bundle("plans.bundle")
    """
    _C.set_bundle(str(Path(path).expanduser().resolve()), -1, "", "", [], "", [], [])


def _require_private(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a bundle of plans: it is not a file")
    for what, where in ((path, status), (path.parent, path.parent.stat())):
        if where.st_uid not in (0, os.geteuid()):
            reason = "belongs to another user"
        elif where.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            reason = f"can be written by other users; `chmod go-w {what}` forbids it"
        else:
            continue
        raise PermissionError(f"{path} is not used, for plans are code: {what} {reason}")


def _read_header(path: Path, file: int, size: int) -> tuple[dict[str, Any], int]:
    """The header, and where the first record begins."""
    line, newline, _ = os.pread(file, _MOST_LINE_BYTES, 0).partition(b"\n")
    if not line.startswith(_TITLE + b" "):
        raise ValueError(f"{path} is not a bundle of plans")
    corrupted = ValueError(f"{path} is corrupted: its checksum differs; copy it again")
    try:
        form, length, checksum = line[len(_TITLE) :].decode("ascii").split()
        if int(form) != _FORMAT:
            raise RuntimeError(
                f"{path} is of format {form} and this version of cudnn_ops reads {_FORMAT}; "
                + _AGAIN
            )
        begin = len(line) + len(newline) + int(length)
        if int(length) < 0:
            raise corrupted
    except ValueError:
        raise corrupted from None
    if begin > size:
        raise ValueError(f"{path} is truncated: it ends within its header; copy it again")
    header = os.pread(file, int(length), begin - int(length))
    if hashlib.sha256(header).hexdigest() != checksum:
        raise corrupted
    content = json.loads(header)
    expected = begin + content["bytes"]
    if size != expected:
        what = "truncated" if size < expected else "corrupted"
        raise ValueError(f"{path} is {what}: it has {size} bytes of {expected}; copy it again")
    return content, begin


def _require_versions(path: Path, made: Mapping[str, Any]) -> None:
    here = _versions()
    for name, what in (("cudnn", "cuDNN"), ("frontend", "cuDNN Frontend")):
        if made[name] != here[name]:
            was, is_ = (support.format_cudnn_version(v[name]) for v in (made, here))
            raise RuntimeError(f"{path} was made with {what} {was}, and this is {is_}; {_AGAIN}")
    if made["graphs"] != here["graphs"]:
        raise RuntimeError(
            f"{path} was made by another version of cudnn_ops (graphs {made['graphs']}, here "
            f"{here['graphs']}); {_AGAIN}"
        )


def _require_gpu(path: Path, gpu: str, description: str, device: str) -> None:
    made, here = json.loads(gpu), json.loads(description)
    differing = [name for name in COMPARED if _differs(name, made, here)]
    if differing:
        facts = ", ".join(_difference(name, made, here) for name in differing)
        raise RuntimeError(
            f"{path} was made for {_name(gpu)}, and cuDNN does not run its plans on {device} "
            f"({_name(description)}): {facts}; {_AGAIN}"
        )


def _differs(name: str, made: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    version = _C.cudnn_version()
    # An older cuDNN describes a GPU by fewer fields.
    if version < COMPARED[name] or name not in made or name not in here:
        return False
    if name == "driverVer" and version >= ACCEPTS_NEWER_DRIVERS:
        return bool(here[name] < made[name])
    return bool(here[name] != made[name])


def _difference(name: str, made: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if name != "driverVer":
        return f"its {name} is {here[name]}, the bundle's {made[name]}"
    was, is_ = (f"{gpu[name] // 1000}.{gpu[name] % 1000 // 10}" for gpu in (made, here))
    return f"its driver is for CUDA {is_}, the bundle for {was}"


def _name(description: str) -> str:
    return str(json.loads(description).get("deviceName", "a GPU without a name"))


def _like(index: int) -> list[int]:
    """All live GPUs that are like this one."""

    def facts(index: int) -> tuple[object, ...]:
        gpu = torch.cuda.get_device_properties(index)
        return gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, gpu.total_memory

    return [other for other in range(torch.cuda.device_count()) if facts(other) == facts(index)]
