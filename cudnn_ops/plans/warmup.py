"""Building plans before they are needed, for given or recorded shapes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from cudnn_ops import _C, support
from cudnn_ops.plans.policy import plan_policy
from cudnn_ops.support.attempts import Kind
from cudnn_ops.support.device import sm_version
from cudnn_ops.support.operators import find_operator

Made = TypeVar("Made")


@dataclass(frozen=True)
class PlanRequest:
    """One plan, for any device, for :func:`warmup` to build.

    ``words`` is its key: integers that are valid only for the version of cudnn_ops that created
    them. :func:`save_requests` notes that version beside them.
    """

    words: tuple[int, ...]

    def __str__(self) -> str:
        """The operator and all parameters of the plan, as text."""
        return _C.describe_plan(self.words)

    @property
    def op(self) -> str:
        """The operator, such as ``"sdpa"`` or ``"sdpa_backward"``."""
        return str(self).partition("(")[0]


class WarmupReport(NamedTuple):
    """Result of :func:`warmup`."""

    built: int
    """Plans built."""
    loaded: int
    """Plans loaded from the store or from a bundle."""
    ready: int
    """Plans that were in the cache already."""
    refused: dict[PlanRequest, str]
    """Plans that cuDNN does not support on this GPU, with its reason."""


def plan_requests(
    op: str,
    q: support.TensorSpec | None = None,
    k: support.TensorSpec | None = None,
    v: support.TensorSpec | None = None,
    *,
    training: bool = True,
    plans: Literal["exact", "polymorphic", "both"] | None = None,
    device: str | Path | None = None,
    **options: Any,
) -> list[PlanRequest]:
    """The plans that calls with these shapes need.

    Args:
        op: an operator, one of :data:`cudnn_ops.support.OPERATORS`; its backward comes with it. The
            plans of norms, convolutions and linear layers are all exact, those of packed and paged
            attention all polymorphic. Linear layers have plans where the table of this package says
            that they are faster; ``graph=True`` asks for them wherever there are any.
        q: the query, or the input of another operator, as :func:`cudnn_ops.support.explain` accepts
            it: a tensor, ``(shape, dtype)`` or ``(shape, dtype, strides)``.
        k: the key, or a weight; None stands for a key like the query.
        v: the value, or the second weight of ``mlp``; None stands for a value like the key.
        training: the forward that a gradient follows, and the backward; else the forward alone.
        plans: those of exactly these shapes, the polymorphic ones that serve them and others, or
            both. None stands for what the policy in force may need: both under ``"auto"``.
        device: the GPU that they are for, as in :func:`cudnn_ops.support.explain`: packed
            attention's plans for training differ between GPUs. None stands for the live one, or for
            an H200 where there is none.
        options: of the call, such as ``is_causal=True``; as in
            :func:`cudnn_ops.support.explain`.

    Raises:
        ValueError: an unknown op or device; shapes that do not fit each other, or that no GPU
            supports.
        TypeError: an argument that the operator does not accept.

    Example:
        >>> import torch, cudnn_ops
        >>> requests = cudnn_ops.plan_requests("rms_norm", ((8192, 4096), torch.bfloat16))
        >>> [request.op for request in requests]
        ['norm', 'norm_backward']
    """
    operator = find_operator(op)
    operands = operator.take_operands((q, k, v), options)
    if plans is None:
        policy = plan_policy()
        plans = "both" if policy == "auto" else policy
    kinds = {"exact": [False], "polymorphic": [True], "both": [False, True]}
    if plans not in kinds:
        raise ValueError(f"plans must be one of {', '.join(kinds)}, got {plans!r}")
    wanted = (
        kinds[plans]
        if operator.has_exact and operator.has_polymorphic
        else [operator.has_polymorphic]
    )
    training = training and operator.has_backward
    steps = [operator]
    if training and not operator.is_backward:
        steps.append(find_operator(f"{op}_backward"))
    if device is not None:
        sm = sm_version(support.prepare(device))
    else:
        sm = sm_version("current") if torch.cuda.is_available() else 90
    requests = []
    for polymorphic in wanted:
        kind = Kind(training=training, polymorphic=polymorphic, sm=sm)
        for step in steps:
            for part in step.parts(kind, operands, options):
                attempt = next(part)
                if attempt.refusal and not (polymorphic and plans == "both"):
                    raise ValueError(f"{step.name}: {attempt.refusal}")
                if attempt.words:
                    requests.append(PlanRequest(tuple(attempt.words)))
    return requests


@contextmanager
def record_shapes() -> Iterator[list[PlanRequest]]:
    """Records every plan that calls inside it request, in any thread, each once.

    The list is filled when the context ends::

        with cudnn_ops.record_shapes() as shapes:
            train_one_epoch()
        cudnn_ops.save_requests(shapes, "shapes.json")

        # in the next process, before the first step
        cudnn_ops.warmup(cudnn_ops.load_requests("shapes.json"))

    Example:
        >>> import torch, cudnn_ops
        >>> from cudnn_ops.support import explain
        >>> with cudnn_ops.record_shapes() as shapes:
        ...     answer = explain("rms_norm", ((64, 512), torch.bfloat16), device="h200")
        >>> len(shapes)
        1
    """
    requests: list[PlanRequest] = []
    recording = _C.start_recording()
    try:
        yield requests
    finally:
        requests += (PlanRequest(tuple(words)) for words in _C.stop_recording(recording))


def warmup(
    requests: Iterable[PlanRequest],
    *,
    device: str | Path | int | torch.device = "current",
    threads: int | None = None,
    progress: bool = True,
) -> WarmupReport:
    """Builds plans, or loads them from the store or a bundle, so that no call has to.

    Args:
        requests: the result of :func:`plan_requests` for given shapes, or of
            :func:`record_shapes` for those of a run.
        device: ``"current"`` or a CUDA device; or a described GPU as in
            :func:`cudnn_ops.support.explain`, to see what cuDNN supports there.
        threads: how many plans are built at once; None stands for the number of CPUs, at most 8.
        progress: whether to show a progress bar on the terminal.

    Raises:
        ValueError: requests of another version of cudnn_ops; an unknown device.
        RuntimeError: libcudnn cannot be loaded, there is no such GPU, or cuDNN failed.

    Example:
        >>> import torch, cudnn_ops
        >>> input = ((64, 512), torch.bfloat16)
        >>> requests = cudnn_ops.plan_requests("rms_norm", input, training=False)
        >>> report = cudnn_ops.warmup(requests, device="h200", progress=False)
        >>> report.refused
        {}
    """
    todo = distinct(requests)
    index, description = resolve_device(device)
    before = _C.cache_info()
    refused: dict[PlanRequest, str] = {}

    def make(request: PlanRequest) -> str:
        if index is None:
            supported, reason, *_ = _C.make_plan(request.words, description)
        else:
            with torch.cuda.device(index):
                supported, reason, *_ = _C.make_plan(request.words, description)
        return "" if supported else reason

    for request, reason in in_threads(make, todo, threads=threads, progress=progress):
        if reason:
            refused[request] = reason
    after = _C.cache_info()
    built, loaded = after[1] - before[1], after[2] - before[2]
    return WarmupReport(built, loaded, len(todo) - built - loaded - len(refused), refused)


def distinct(requests: Iterable[PlanRequest]) -> list[PlanRequest]:
    """Each once.

    Raises:
        ValueError: one of another version of cudnn_ops.
    """
    todo = list(dict.fromkeys(requests))
    for request in todo:
        str(request)  # raises for what is no request of this version
    return todo


def in_threads(
    make: Callable[[PlanRequest], Made],
    requests: Sequence[PlanRequest],
    *,
    threads: int | None,
    progress: bool,
) -> Iterator[tuple[PlanRequest, Made]]:
    """What ``make`` returns for each request, as soon as it does, under a progress bar."""
    from tqdm.auto import tqdm  # here: importing the package must be quick

    workers = threads or min(8, os.cpu_count() or 1)
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="cudnn_ops-warmup") as pool,
        tqdm(total=len(requests), desc="cuDNN plans", disable=not progress, leave=False) as bar,
    ):
        submitted = {pool.submit(make, request): request for request in requests}
        for done in as_completed(submitted):
            yield submitted[done], done.result()
            bar.update()


def resolve_device(device: str | Path | int | torch.device) -> tuple[int | None, str]:
    """The index of a live device, or None, and its description for C++."""
    if isinstance(device, int):
        device = torch.device("cuda", device)
    elif isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
        support.prepare("current")
        return torch.cuda.current_device() if device.index is None else device.index, "current"
    description = support.prepare(device)
    return (torch.cuda.current_device() if description == "current" else None), description
