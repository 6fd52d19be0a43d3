"""What cuDNN takes, on the GPU that is there or on one that is described by a file.

``explain`` builds the very plan that a call would build, with the real libcudnn, on any
machine: where there is no GPU driver, a stub of one that comes with the package lets cuDNN
compile its kernels all the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cudnn_ops import _C
from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.ops.conv import as_list
from cudnn_ops.ops.paged import KVLayout, is_head_major
from cudnn_ops.support.arguments import take_operands, with_effect
from cudnn_ops.support.device import format_cudnn_version, prepare

#: The names of the norms' plans.
NORMS = ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward")
#: Convolutions, and their two gradients, by the number of dimensions.
CONVS = {f"conv{dims}d{step}": dims for step in ("", "_backward") for dims in (1, 2, 3)}

#: What describes a tensor: a tensor (its data are not read), or its shape and dtype, or its
#: shape, dtype and strides. Without strides it is contiguous.
TensorSpec = (
    Tensor | tuple[Sequence[int], torch.dtype] | tuple[Sequence[int], torch.dtype, Sequence[int]]
)


@dataclass(frozen=True)
class Explanation:
    """cuDNN's answer for one operator, one set of shapes and one GPU."""

    op: str
    supported: bool
    reason: str
    """cuDNN's own reason where it is not supported, else empty."""
    engine: str
    """cuDNN's name of the engine that it chose and of its knobs."""
    workspace_bytes: int
    """Scratch memory of a call, in bytes."""
    device: str
    """The GPU's name."""
    cudnn_version: str

    def __str__(self) -> str:
        where = f"{self.op} on {self.device}, cuDNN {self.cudnn_version}"
        if not self.supported:
            return f"{where}: not supported\n  reason: {self.reason}"
        return (
            f"{where}: supported\n  engine: {self.engine}\n"
            f"  workspace: {self.workspace_bytes:,} bytes"
        )


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
    """Asks cuDNN whether it takes a call, by building its plan. Takes about half a second.

    Args:
        op: ``"sdpa"``, or ``"sdpa_backward"`` for its derivative (the deterministic one under
            ``torch.use_deterministic_algorithms(True)``); ``"paged_attention"``; or one of
            :data:`NORMS`; or one of :data:`CONVS`, where a backward is supported if cuDNN takes
            both gradients.
        q: the query, or the input of a norm: a tensor, ``(shape, dtype)`` or
            ``(shape, dtype, strides)``, a query with shape [batch, heads, length, head size], and
            strides in elements. May be called as the operator calls it (``query``, ``input``), and
            so may k and v.
        k: the key; None stands for one like the query.
        v: the value; None stands for one like the key.
        with_lse: whether the forward also stores the log-sum-exp, as it does in training.
        polymorphic: asks about the plan that serves other batch sizes and lengths too
            (:mod:`cudnn_ops.plans.policy`), not about the one for these sizes alone.
        device: ``"current"`` for the live GPU, a name of :func:`devices`, or the path of a
            file that :func:`describe_device` wrote.
        options: all arguments of the operator's public function by name, those too that no plan
            depends on (``scale``, ``enable_gqa``, ``rng_state``, ``eps``, ``out``). What a tensor
            holds does not matter: it may be ``(shape, dtype)``, and True where there is but one
            shape (``alibi_slopes``, ``sinks``, ``seq_lens_q``, ``seq_lens_kv``, ``cu_seqlens_q``, a
            norm's ``weight`` and ``bias``, a convolution's ``bias`` and ``residual``); a norm's
            ``weight`` and ``bias`` may be a dtype, ``page_table`` a shape. Of attention
            ``grad_mask=True`` asks for the gradient of the mask too; of a norm
            ``with_stats=True`` for the forward that a backward follows, and ``normalized_shape``
            is the last dimension by default. Of a convolution ``reason`` says where the whole
            epilogue is not in cuDNN's graph, and why: cuDNN does not take it, or is faster without.
            ``engine`` is ``"torch"`` where torch's own kernel runs, and ``reason`` says why.

    The reason is one sentence; where the environment has ``CUDNN_OPS_FULL_REASONS``, it is all that
    cuDNN says, engine by engine.

    Raises:
        ValueError: an unknown op or device; shapes that do not fit each other.
        TypeError: an argument that the operator does not take.
        RuntimeError: no libcudnn can be loaded, no GPU is there for ``"current"``, or cuDNN failed,
            such as for want of memory or of NVRTC, which says nothing about support.
    """
    _check_known(op)
    q, k, v = take_operands(op, (q, k, v), options)
    if q is None:
        raise TypeError(f"explain needs q, the {'query' if 'attention' in op else 'input'} of {op}")
    description = prepare(device)
    if op in CONVS:
        supported, reason, engine, workspace = _explain_conv(op, q, k, description, **options)
    else:
        words, refusal = plan_key(
            op, q, k, v, with_lse=with_lse, polymorphic=polymorphic, **options
        )
        supported, reason, engine, workspace = False, refusal, "", 0
        if not refusal:
            supported, reason, engine, workspace = _C.make_plan(words, description)
    if description == "current":
        name = torch.cuda.get_device_name()
    else:
        name = json.loads(description).get("deviceName", str(device))
    return Explanation(
        op, supported, reason, engine, workspace, name, format_cudnn_version(_C.cudnn_version())
    )


def _check_known(op: str) -> None:
    known = ("sdpa", "sdpa_backward", "paged_attention", *NORMS, *CONVS)
    if op not in known:
        hint = ""
        if op.startswith("varlen"):
            hint = '; packed sequences have the plans of "sdpa" with polymorphic=True'
        raise ValueError(f"op is one of {', '.join(known)}, got {op!r}{hint}")


def plan_key(
    op: str,
    q: TensorSpec,
    k: TensorSpec | None,
    v: TensorSpec | None,
    *,
    with_lse: bool,
    polymorphic: bool,
    **options: Any,
) -> tuple[Sequence[int], str]:
    """The key of the plan that such a call needs; or why it has none."""
    _check_known(op)
    if op == "paged_attention":
        return _paged_plan_key(q, k, v, with_lse=with_lse, **with_effect(op, options)), ""
    if op in NORMS:
        return norm_plan_key(op, q, **options), ""
    options = with_effect(op, options)
    query, key, value = meta_tensors(q, k, v)
    if options.get("attn_mask") is not None:
        options["attn_mask"] = _meta_tensor(options["attn_mask"], "attn_mask")
    heads = query.shape[-3] if query.dim() > 2 else 1
    batch = math.prod(query.shape[:-3])
    for name, size, dtype in (
        ("alibi_slopes", heads, torch.float32),
        ("sinks", heads, torch.float32),
        ("seq_lens_q", batch, torch.int32),
        ("seq_lens_kv", batch, torch.int32),
    ):
        options[name] = _optional(options.get(name), name, (size,), dtype)
    return torch.ops.cudnn_ops._sdpa_plan_key(
        query,
        key,
        value,
        **options,
        with_lse=with_lse,
        backward=op == "sdpa_backward",
        polymorphic=polymorphic,
    )


def _paged_plan_key(
    query: TensorSpec,
    key_cache: TensorSpec | None,
    value_cache: TensorSpec | None,
    *,
    page_table: TensorSpec | Sequence[int] | None = None,
    cu_seqlens_q: TensorSpec | bool | None = None,
    sinks: TensorSpec | bool | None = None,
    kv_layout: KVLayout = "NHD",
    **options: Any,
) -> Sequence[int]:
    if key_cache is None or page_table is None:
        raise ValueError("paged_attention is asked about with k, the key cache, and page_table")
    query = _meta_tensor(query, "q")
    if not isinstance(page_table, Tensor) and all(isinstance(size, int) for size in page_table):
        page_table = (page_table, torch.int32)  # type: ignore[assignment]
    table = _meta_tensor(page_table, "page_table")  # type: ignore[arg-type]
    batch = table.shape[0]
    key_cache = _meta_tensor(key_cache, "k")
    return torch.ops.cudnn_ops._paged_plan_key(
        query,
        key_cache,
        key_cache if value_cache is None else _meta_tensor(value_cache, "v"),
        table,
        torch.empty(batch, dtype=torch.int32, device="meta"),
        cu_seqlens_q=_optional(cu_seqlens_q, "cu_seqlens_q", (batch + 1,), torch.int32),
        sinks=_optional(sinks, "sinks", query.shape[-2:-1], torch.float32),
        head_major=is_head_major(kv_layout),
        **options,
    )


#: What runs in one graph, by csrc/ops/conv_problem.h's ConvFusion.
_FUSIONS = (
    "all",
    "the convolution, bias and residual",
    "the convolution and its bias",
    "the convolution",
)


def _explain_conv(
    op: str, input: TensorSpec, weight: TensorSpec | None, description: str, **options: Any
) -> tuple[bool, str, str, int]:
    by_torch = _reasons_for_torch(op, input, weight, **options)
    if op.endswith("_backward"):
        keys = iter(conv_plan_keys(op, input, weight, **options))
        of_input, of_weight = answers = [
            (True, reason, "torch", 0) if reason else _C.make_plan(next(keys), description)
            for reason in by_torch
        ]
        return (
            of_input[0] and of_weight[0],
            "; ".join(dict.fromkeys(answer[1] for answer in answers if answer[1])),
            f"{of_input[2]}, {of_weight[2]}",
            max(of_input[3], of_weight[3]),
        )
    if by_torch[0]:
        return True, by_torch[0], "torch", 0
    refusal = ""
    for fusion, words, reason in _conv_plans(op, input, weight, **options):
        refusal = refusal or reason
        supported, reason, engine, workspace = _C.make_plan(words, description)
        if supported and refusal:
            reason = f"only {_FUSIONS[fusion]} in one graph, the rest in one more pass: {refusal}"
        if supported:
            break
        refusal = refusal or reason
    return supported, reason, engine, workspace


def conv_plan_keys(
    op: str, input: TensorSpec, weight: TensorSpec | None, **options: Any
) -> list[Sequence[int]]:
    """The keys of the plans of one of :data:`CONVS`: for less and less fused, or both gradients.

    There is none for what torch's own kernel computes.

    ``with_before=True``: what the activation is of is a result too, as training needs it.
    """
    by_torch = _reasons_for_torch(op, input, weight, **options)
    if not op.endswith("_backward"):
        plans = () if by_torch[0] else _conv_plans(op, input, weight, **options)
        return [words for _, words, _ in plans]
    key = torch.ops.cudnn_ops._conv_backward_plan_key
    x, w, _, _, geometry, _, _ = _conv_arguments(op, input, weight, **with_effect(op, options))
    return [
        key(x, w, geometry, is_of_weight)
        for is_of_weight, reason in zip((False, True), by_torch, strict=True)
        if not reason
    ]


def _reasons_for_torch(
    op: str, input: TensorSpec, weight: TensorSpec | None, **options: Any
) -> list[str]:
    """Why torch's own kernel runs in place of cuDNN's, or "": the forward, or for each gradient."""
    x, w, _, _, geometry, _, _ = _conv_arguments(op, input, weight, **with_effect(op, options))
    # csrc/ops/conv_choice.h's ConvStep.
    steps = (1, 2) if op.endswith("_backward") else (0,)
    return [torch.ops.cudnn_ops._conv_torch_reason(x, w, geometry, step) for step in steps]


def _conv_plans(
    op: str, input: TensorSpec, weight: TensorSpec | None, **options: Any
) -> Iterator[tuple[int, Sequence[int], str]]:
    """The plans of a forward in the order in which a call tries them.

    For each how much is fused, by the place in :data:`_FUSIONS`; its key; and why what takes more
    of the epilogue is not tried, if it is not.
    """
    ops = torch.ops.cudnn_ops
    *tensors, with_before = _conv_arguments(op, input, weight, **with_effect(op, options))
    nothing = len(_FUSIONS) - 1
    for fusion in range(len(_FUSIONS)):
        reason = ops._conv_bare_reason(*tensors, fusion)
        last = nothing if reason else fusion
        yield last, ops._conv_plan_key(*tensors, last, with_before), reason
        if last == nothing:
            return


def _conv_arguments(
    op: str,
    input: TensorSpec,
    weight: TensorSpec | None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "none",
    bias: TensorSpec | bool | None = None,
    residual: TensorSpec | bool | None = None,
    with_before: bool = False,
) -> tuple[Any, ...]:
    """Of ``_conv``. ``with_before``: what the activation is of is a result too, for training."""
    if weight is None:
        raise ValueError(f"{op} needs k, the weight")
    ops = torch.ops.cudnn_ops
    x, w = _meta_tensor(input, "q"), _meta_tensor(weight, "k")
    pads = padding if isinstance(padding, str) else as_list(padding)
    geometry = ops._conv_geometry(CONVS[op], w, as_list(stride), pads, as_list(dilation), groups)
    added = _optional(bias, "bias", w.shape[:1], x.dtype)
    size = ops._conv_size(x, w, None, None, geometry)
    total = _optional(residual, "residual", size, x.dtype)
    ops._conv_size(x, w, added, total, geometry)  # raises where they do not fit
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return x, w, added, total, geometry, ACTIVATIONS.index(activation), with_before


def norm_plan_key(op: str, input: TensorSpec, **options: Any) -> Sequence[int]:
    """The key of the plan of one of :data:`NORMS`; arguments as in :func:`explain`."""
    return _norm_plan_key(op, input, **with_effect(op, options))


def _norm_plan_key(
    op: str,
    input: TensorSpec,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight: TensorSpec | torch.dtype | bool | None = True,
    bias: TensorSpec | torch.dtype | bool | None = None,
    zero_centered: bool = False,
    with_stats: bool = False,
) -> Sequence[int]:
    x = _meta_tensor(input, "q")
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape

    def parameter(kind: TensorSpec | torch.dtype | bool | None, name: str) -> Tensor | None:
        if isinstance(kind, torch.dtype):
            return torch.empty(shape, dtype=kind, device="meta")
        return _optional(kind, name, shape, x.dtype)

    return torch.ops.cudnn_ops._norm_plan_key(
        x,
        shape,
        weight=parameter(weight, "weight"),
        bias=parameter(bias, "bias"),
        is_layer=op.startswith("layer"),
        zero_centered=zero_centered,
        with_stats=with_stats,
        backward=op.endswith("_backward"),
    )


def meta_tensors(
    q: TensorSpec, k: TensorSpec | None, v: TensorSpec | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value without data; a key that is None is like the query, a value the key."""
    query = _meta_tensor(q, "q")
    key = query if k is None else _meta_tensor(k, "k")
    return query, key, key if v is None else _meta_tensor(v, "v")


def _meta_tensor(spec: TensorSpec, name: str) -> Tensor:
    if isinstance(spec, Tensor):
        return torch.empty_strided(spec.shape, spec.stride(), dtype=spec.dtype, device="meta")
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise ValueError(
            f"{name} must be a tensor, (shape, dtype) or (shape, dtype, strides), got {spec!r}"
        )
    shape, dtype = spec[:2]
    if len(spec) == 3:
        return torch.empty_strided(shape, spec[2], dtype=dtype, device="meta")
    return torch.empty(shape, dtype=dtype, device="meta")


def _optional(
    spec: TensorSpec | bool | None, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """What may be there: True stands for a tensor of this shape and dtype."""
    if spec is None or isinstance(spec, bool):
        return torch.empty(shape, dtype=dtype, device="meta") if spec else None
    return _meta_tensor(spec, name)
