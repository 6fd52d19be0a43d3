"""Asking cuDNN about a call, by building the very plan that it would build, on any machine.

Where there is no GPU driver, a stub of one that comes with the package lets the real libcudnn
compile its kernels all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cudnn_ops import _C
from cudnn_ops.support.attempts import Attempt, Kind
from cudnn_ops.support.device import format_cudnn_version, prepare, sm_version
from cudnn_ops.support.operators import find_operator
from cudnn_ops.support.specs import TensorSpec

_SOURCES = {"store": "the store on disk", "package": "the package"}


@dataclass(frozen=True)
class Explanation:
    """cuDNN's answer for one operator, one set of shapes and one GPU."""

    op: str
    supported: bool
    reason: str
    """cuDNN's own reason where it is not supported; where it is, empty, or what runs outside of
    cuDNN's graph and why."""
    engine: str
    """cuDNN's name of the engine that it chose and of its knobs; ``"cudnn_ops"`` for a kernel of
    ours, ``"cublasLt"`` for an epilogue of cuBLASLt's, ``"torch"`` for torch's own kernels."""
    workspace_bytes: int
    """Scratch memory of a call, in bytes."""
    device: str
    """The GPU's name."""
    cudnn_version: str
    source: str
    """Where the plan is from: ``"build"`` if this process built it, ``"store"``, ``"package"`` if
    it came with cudnn_ops, or the path of a bundle; empty if there is no plan."""

    def __str__(self) -> str:
        where = f"{self.op} on {self.device}, cuDNN {self.cudnn_version}"
        if not self.supported:
            return f"{where}: not supported\n  reason: {self.reason}"
        lines = [f"{where}: supported", f"engine: {self.engine}"]
        if self.reason:
            lines.append(f"note: {self.reason}")
        if self.source not in ("", "build"):
            lines.append(f"plan: from {_SOURCES.get(self.source, f'the bundle {self.source}')}")
        return "\n  ".join([*lines, f"workspace: {self.workspace_bytes:,} bytes"])


def explain(
    op: str,
    q: TensorSpec | None = None,
    k: TensorSpec | None = None,
    v: TensorSpec | None = None,
    *,
    with_lse: bool = False,
    polymorphic: bool = False,
    device: str | Path = "current",
    **options: Any,
) -> Explanation:
    """Asks cuDNN whether it supports a call, by building its plan. Takes about half a second.

    Args:
        op: the operator, one of :data:`cudnn_ops.support.OPERATORS`: ``"sdpa"``,
            ``"varlen_attention"``, ``"paged_attention"``, the norms, convolutions and linear layers
            by the names of their functions, and ``"sdpa_backward"`` and so on for their derivatives
            (the deterministic one under ``torch.use_deterministic_algorithms(True)``). The backward
            of a convolution is supported if both gradients are.
        q: the first tensor of a call: the query, or the input of any other operator. A tensor (its
            data are not read), ``(shape, dtype)``, or ``(shape, dtype, strides)`` with strides in
            elements. Also accepted under the operator's own name for it (``query``, ``input``), and
            so are k and v.
        k: the key, a page cache of keys, the weight of a convolution or a linear layer, or ``w1``;
            None stands for a key like the query.
        v: the value, or ``w2``; None stands for a value like the key.
        with_lse: whether the forward also stores the log-sum-exp, as it does in training.
        polymorphic: asks about the plan that serves other batch sizes and lengths too
            (:func:`cudnn_ops.set_plan_policy`), not about the one for these sizes alone. Packed and
            paged attention have no other.
        device: ``"current"`` for the live GPU, a name of :func:`devices` in any case, or the path
            of a file that :func:`describe_device` wrote.
        options: all arguments of the operator's public function by name, those too that no plan
            depends on (``scale``, ``enable_gqa``, ``rng_state``, ``eps``, ``out``). What a tensor
            holds does not matter: it may be ``(shape, dtype)``, and True where there is but one
            shape (``alibi_slopes``, ``sinks``, ``seq_lens_q``, ``seq_lens_kv``, ``seqused_q``,
            ``seqused_k``, a norm's ``weight`` and ``bias``, other biases and ``residual``). A
            norm's ``weight`` and ``bias`` may be a dtype, ``page_table`` a shape, ``cu_seqlens_q``
            of packed attention the number of sequences. Attention also accepts ``grad_mask=True``,
            for the gradient of the mask too. For the forward that a backward follows, a norm
            accepts ``with_stats=True``, a convolution and ``linear`` ``with_before=True``, ``mlp``
            ``with_saved=True``. Linear layers accept ``graph=True``, for cuDNN's graph where there
            is one, whether or not something else is faster.
            ``normalized_shape`` is the last dimension by default.

    Returns:
        The answer. Of a convolution ``reason`` says where the whole epilogue is not in cuDNN's
        graph, and why: cuDNN does not support it, or is faster without. ``engine`` is
        ``"cudnn_ops"`` where a kernel of this package runs, ``"torch"`` where one of torch's does
        (of linear layers also ``"cublasLt"``), and ``reason`` says why; linear layers have one for
        each of their parts. A refusal's reason is one sentence; with ``CUDNN_OPS_FULL_REASONS`` in
        the environment it is all that cuDNN says, engine by engine.

    Raises:
        ValueError: an unknown op or device; shapes that do not fit each other.
        TypeError: an argument that the operator does not accept.
        RuntimeError: no libcudnn can be loaded, no GPU is there for ``"current"``, or cuDNN failed,
            such as for want of memory or of NVRTC, which says nothing about support.

    Example:
        >>> import torch
        >>> from cudnn_ops.support import explain
        >>> query = ((4, 32, 2048, 128), torch.bfloat16)
        >>> explain("sdpa", query, is_causal=True, device="H200").supported
        True
    """
    operator = find_operator(op)
    operands = operator.take_operands((q, k, v), options)
    description = prepare(device)
    kind = Kind(training=with_lse, polymorphic=polymorphic, sm=sm_version(description))
    answers = [
        first_supported(attempts, description)
        for attempts in operator.parts(kind, operands, options)
    ]
    supported, reasons, engines, workspaces, sources = zip(*answers, strict=True)
    if description == "current":
        name = torch.cuda.get_device_name()
    else:
        name = json.loads(description).get("deviceName", str(device))
    return Explanation(
        op,
        all(supported),
        "; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        ", ".join(engines),
        max(workspaces),
        name,
        format_cudnn_version(_C.cudnn_version()),
        ", ".join(dict.fromkeys(source for source in sources if source)),
    )


def first_supported(
    attempts: Iterable[Attempt], description: str
) -> tuple[bool, str, str, int, str]:
    """Builds plans until one is supported.

    Returns:
        Whether one is, why (not), the engine, workspace bytes, and where the plan is from.
    """
    refusal = reason = ""
    for attempt in attempts:
        if attempt.without_plan:
            reasons = filter(None, (attempt.without_plan, refusal))
            return True, "; ".join(reasons), attempt.engine, 0, ""
        if attempt.refusal:
            return False, attempt.refusal, "", 0, ""
        refusal = refusal or attempt.not_more
        supported, reason, engine, workspace, source = _C.make_plan(attempt.words, description)
        if supported:
            if refusal:
                reason = f"only {attempt.fused} in one graph, the rest in one more pass: {refusal}"
            reason = "; ".join(filter(None, (reason, attempt.note)))
            return True, reason, engine, workspace, source or "build"
        refusal = refusal or reason
    return False, reason, "", 0, ""


def plan_key(
    op: str,
    q: TensorSpec,
    k: TensorSpec | None,
    v: TensorSpec | None,
    *,
    with_lse: bool,
    polymorphic: bool,
    sm: int = 90,
    **options: Any,
) -> tuple[Sequence[int], str]:
    """The key of the plan that a call tries first; or none, and why."""
    kind = Kind(training=with_lse, polymorphic=polymorphic, sm=sm)
    parts = find_operator(op).parts(kind, (q, k, v), options)
    attempt = next(parts[0])
    return attempt.words, attempt.refusal or attempt.without_plan
