"""The operators that can be asked about: one table, for every question about their plans.

:func:`~cudnn_ops.support.explain`, ``plan_requests``, ``python -m cudnn_ops`` and the support
tables all start here. An entry says which arguments a question accepts, which of them a plan
depends on, and which plans a call would build.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS, needs_before
from cudnn_ops.ops.batch_norm import BatchNormActivation, batch_norm
from cudnn_ops.ops.conv import as_list, conv1d, conv2d, conv3d
from cudnn_ops.ops.conv_transpose import conv_transpose1d, conv_transpose2d, conv_transpose3d
from cudnn_ops.ops.linear import linear, mlp
from cudnn_ops.ops.mxfp8 import meta_scales, sdpa_mxfp8
from cudnn_ops.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from cudnn_ops.ops.paged import KVLayout, is_head_major, paged_attention
from cudnn_ops.ops.sdpa import empty_like_order, scaled_dot_product_attention
from cudnn_ops.ops.sdpa_fp8 import sdpa_fp8
from cudnn_ops.ops.sdpa_fp8_backward import sdpa_fp8_backward
from cudnn_ops.ops.varlen import varlen_attention
from cudnn_ops.ops.varlen_fp8 import varlen_attention_fp8
from cudnn_ops.support.attempts import Attempt, Kind, Parts
from cudnn_ops.support.linear import linear_parts, mlp_parts
from cudnn_ops.support.specs import (
    TensorSpec,
    meta_tensor,
    offsets_tensor,
    optional_tensor,
)

_ops = torch.ops.cudnn_ops


@dataclass(frozen=True)
class Operator:
    """One operator: its arguments, and its plans."""

    name: str
    function: Callable[..., Any]
    """The public function: its arguments are a question's."""
    operands: tuple[str, ...]
    """Those of its arguments that a question calls q, k and v."""
    plans: Callable[..., Parts]
    """Given a :class:`Kind`, the operands and the options that have an effect."""
    required: int = 1
    """How many operands a question must give; a later one that is None is like the one before."""
    without_effect: tuple[str, ...] = ()
    """Arguments that one plan serves whatever they are."""
    questions: tuple[str, ...] = ()
    """What can be asked beside its arguments."""
    training: str = "with_lse"
    """The name under which a question asks for the forward that a backward follows."""
    has_backward: bool = True
    is_backward: bool = False
    has_exact: bool = True
    """Whether there are plans of exactly the shapes given, beside polymorphic ones."""
    has_polymorphic: bool = False

    @property
    def accepted(self) -> list[str]:
        """Names of the options of a question, in the order of the function's arguments."""
        names = [*inspect.signature(self.function).parameters, *self.questions]
        if not self.is_backward and self.training not in names:
            names.append(self.training)
        return [name for name in names if name not in self.operands]

    def take_operands(self, given: Sequence[Any], options: dict[str, Any]) -> list[Any]:
        """The operands, where some may stand among the options under their own names.

        Raises:
            TypeError: one is given twice, or the first one not at all.
            ValueError: another one is missing.
        """
        result = list(given)
        for index, name in enumerate(self.operands):
            if name not in options:
                continue
            if result[index] is not None:
                raise TypeError(f"{self.name} got {name} twice: it is {'qkv'[index]}")
            result[index] = options.pop(name)
        for index, name in enumerate(self.operands[: self.required]):
            if result[index] is None:
                error = TypeError if index == 0 else ValueError
                raise error(f"{self.name} needs {'qkv'[index]}, the {name}")
        return result[: len(self.operands)]

    def with_effect(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that a plan depends on.

        Raises:
            TypeError: one that the operator does not accept; the message has those that it does.
        """
        accepted = self.accepted
        for name in options:
            if name not in accepted:
                near = difflib.get_close_matches(name, accepted, 1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise TypeError(
                    f"{self.name} has no argument {name}{hint} It accepts {', '.join(accepted)}"
                )
        return {name: value for name, value in options.items() if name not in self.without_effect}

    def parts(self, kind: Kind, operands: Sequence[Any], options: dict[str, Any]) -> Parts:
        """The attempts of each part of a call; nothing is built yet."""
        options = self.with_effect(options)
        kind = kind._replace(
            backward=self.is_backward, training=bool(options.pop(self.training, kind.training))
        )
        tensors: list[Tensor] = []
        for spec, name in zip(operands, "qkv", strict=False):
            tensors.append(tensors[-1] if spec is None else meta_tensor(spec, name))
        return self.plans(kind, *tensors, **options)


def _one(words: Sequence[int], refusal: str = "") -> Parts:
    return [iter([Attempt(words, refusal=refusal)])]


def _make_optional(
    options: dict[str, Any], names: Sequence[str], size: int, dtype: torch.dtype
) -> None:
    """Puts tensors of one dimension in place of what describes them."""
    for name in names:
        options[name] = optional_tensor(options.get(name), name, (size,), dtype)


def _attention(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: TensorSpec | None = None,
    **options: Any,
) -> Parts:
    heads = query.shape[-3] if query.dim() > 2 else 1
    batch = math.prod(query.shape[:-3])
    _make_optional(options, ("alibi_slopes", "sinks"), heads, torch.float32)
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), batch, torch.int32)
    words, refusal = _ops._sdpa_plan_key(
        query,
        key,
        value,
        None if attn_mask is None else meta_tensor(attn_mask, "attn_mask"),
        **options,
        with_lse=kind.training,
        backward=kind.backward,
        polymorphic=kind.polymorphic,
    )
    return _one(words, refusal)


def _attention_fp8(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), query.shape[0], torch.int32)
    one = torch.empty(1, device="meta")
    words, refusal = _ops._sdpa_fp8_plan_key(
        *(query, key, value, one, one, one, out_dtype),
        **options,
        with_lse=kind.training,
        sm_major=kind.sm // 10,
    )
    return _one(words, refusal)


def _attention_fp8_backward(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    grad_out: TensorSpec | torch.dtype | None = None,
    grad_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    _make_optional(options, ("seq_lens_q", "seq_lens_kv"), query.shape[0], torch.int32)
    out = empty_like_order([*query.shape[:3], value.shape[3]], query)
    if grad_out is None or isinstance(grad_out, torch.dtype):
        grad_out = torch.empty_like(out, dtype=grad_out)
    lse, one = (torch.empty(shape, device="meta") for shape in (query.shape[:3], 1))
    words, refusal = _ops._sdpa_fp8_backward_plan_key(
        *(meta_tensor(grad_out, "grad_out"), query, key, value, out, lse),
        *([one] * 6),
        grad_dtype,
        **options,
        sm_major=kind.sm // 10,
    )
    return _one(words, refusal)


def _attention_mxfp8(
    kind: Kind,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    scales = meta_scales(query, -1), meta_scales(key, -1), meta_scales(value, -2)
    words, refusal = _ops._sdpa_mxfp8_plan_key(query, key, value, *scales, out_dtype, **options)
    return _one(words, refusal)


def _sequences_of(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: TensorSpec | int | None,
    cu_seqlens_k: TensorSpec | int | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of queries and keys, and the longest of each; those of the queries serve the keys."""
    offsets = offsets_tensor(cu_seqlens_q, "cu_seqlens_q")
    is_same = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    offsets_kv = offsets if is_same else offsets_tensor(cu_seqlens_k, "cu_seqlens_k")
    most = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    most_kv = (most if is_same else k.shape[0]) if max_seqlen_k is None else max_seqlen_k
    return offsets, offsets_kv, most, most_kv


def _packed(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: TensorSpec | int | None = None,
    cu_seqlens_k: TensorSpec | int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Parts:
    sequences = _sequences_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _make_optional(options, ("alibi_slopes", "sinks"), q.shape[1], torch.float32)
    _make_optional(options, ("seqused_q", "seqused_k"), sequences[0].shape[0] - 1, torch.int32)
    words = _ops._varlen_plan_key(
        *(q, k, v, *sequences),
        **options,
        with_lse=kind.training,
        backward=kind.backward,
        sm_major=kind.sm // 10,
    )
    return _one(words)


def _packed_fp8(
    kind: Kind,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: TensorSpec | int | None = None,
    cu_seqlens_k: TensorSpec | int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Parts:
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    sequences = _sequences_of(q, k, *given)
    _make_optional(options, ("seqused_q", "seqused_k"), sequences[0].shape[0] - 1, torch.int32)
    one = torch.empty(1, device="meta")
    words = _ops._varlen_fp8_plan_key(
        *(q, k, v, *sequences, one, one, one, out_dtype), **options, sm_major=kind.sm // 10
    )
    return _one(words)


def _paged(
    kind: Kind,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    page_table: TensorSpec | Sequence[int] | None = None,
    cu_seqlens_q: TensorSpec | bool | None = None,
    sinks: TensorSpec | bool | None = None,
    kv_layout: KVLayout = "NHD",
    **options: Any,
) -> Parts:
    if key_cache.dtype == torch.float8_e4m3fn:
        return [iter([_paged_without_plan(query, key_cache, value_cache)])]
    if page_table is None:
        raise ValueError("paged_attention: page_table is missing, or its shape (batch, pages)")
    if not isinstance(page_table, Tensor) and all(isinstance(size, int) for size in page_table):
        page_table = (page_table, torch.int32)  # type: ignore[assignment]
    table = meta_tensor(page_table, "page_table")  # type: ignore[arg-type]
    batch = table.shape[0]
    words = _ops._paged_plan_key(
        query,
        key_cache,
        value_cache,
        table,
        torch.empty(batch, dtype=torch.int32, device="meta"),
        cu_seqlens_q=optional_tensor(cu_seqlens_q, "cu_seqlens_q", (batch + 1,), torch.int32),
        sinks=optional_tensor(sinks, "sinks", query.shape[-2:-1], torch.float32),
        head_major=is_head_major(kv_layout),
        with_lse=kind.training,
        **options,
    )
    return _one(words)


def _paged_without_plan(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Attempt:
    """Caches of 8 bits, which cuDNN does not decode: as has_paged_decode of the kernel."""
    sizes = query.shape[-1], key_cache.shape[-1], value_cache.shape[-1]
    if query.dtype in (torch.float16, torch.bfloat16) and sizes in ((64,) * 3, (128,) * 3):
        return Attempt(
            without_plan="a kernel of cudnn_ops runs: cuDNN does not decode caches of 8 bits"
        )
    return Attempt(
        refusal="cuDNN does not decode caches of float8_e4m3fn, and the kernel for them supports "
        "head sizes 64 and 128, equal for keys and values, and queries of float16 or bfloat16"
    )


def _norm(
    kind: Kind,
    x: Tensor,
    *,
    is_layer: bool,
    normalized_shape: Sequence[int] | None = None,
    weight: TensorSpec | torch.dtype | bool | None = True,
    bias: TensorSpec | torch.dtype | bool | None = None,
    zero_centered: bool = False,
) -> Parts:
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape
    words = _ops._norm_plan_key(
        x,
        shape,
        weight=optional_tensor(weight, "weight", shape, x.dtype),
        bias=optional_tensor(bias, "bias", shape, x.dtype),
        is_layer=is_layer,
        zero_centered=zero_centered,
        with_stats=kind.training,
        backward=kind.backward,
    )
    return _one(words)


def _batch_norm(
    kind: Kind,
    x: Tensor,
    *,
    running_mean: TensorSpec | torch.dtype | bool | None = True,
    running_var: TensorSpec | torch.dtype | bool | None = True,
    weight: TensorSpec | torch.dtype | bool | None = None,
    bias: TensorSpec | torch.dtype | bool | None = None,
    residual: TensorSpec | bool | None = None,
    activation: BatchNormActivation = "none",
    channels_last: bool = False,
) -> Parts:
    known = get_args(BatchNormActivation)
    if activation not in known:
        raise ValueError(f"activation must be one of {', '.join(known)}, got {activation!r}")
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    vectors = {"running_mean": running_mean, "running_var": running_var}
    vectors |= {"weight": weight, "bias": bias}
    # The gradient is that of training: by running statistics no plan computes it.
    is_training = kind.training or kind.backward
    words, reason = _ops._batch_norm_plan_key(
        x,
        *(
            optional_tensor(spec, name, x.shape[1:2], torch.float32)
            for name, spec in vectors.items()
        ),
        optional_tensor(residual, "residual", x.shape, x.dtype),
        0.1,
        1e-5,
        ACTIVATIONS.index(activation),
        is_training,
        kind.backward,
    )
    if not reason:
        return _one(words)
    return [iter([Attempt(without_plan=reason, engine="torch" if is_training else "cudnn_ops")])]


#: What runs in one graph, by csrc's ConvFusion.
_FUSIONS = (
    "all",
    "the convolution, bias and residual",
    "the convolution and its bias",
    "the convolution",
)


def _conv(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    *,
    dims: int,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    **epilogue: Any,
) -> Parts:
    pads = padding if isinstance(padding, str) else as_list(padding)
    geometry = _ops._conv_geometry(dims, w, as_list(stride), pads, as_list(dilation), groups)
    return _convolution(kind, x, w, geometry, **epilogue)


def _conv_transpose(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    *,
    dims: int,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    **epilogue: Any,
) -> Parts:
    lists = (as_list(numbers) for numbers in (stride, padding, output_padding, dilation))
    geometry = _ops._conv_transpose_geometry(dims, *lists, groups)
    return _convolution(kind, x, w, geometry, **epilogue)


def _convolution(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    geometry: Sequence[int],
    activation: str = "none",
    bias: TensorSpec | bool | None = None,
    residual: TensorSpec | bool | None = None,
) -> Parts:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    size = _ops._conv_size(x, w, None, None, geometry)
    added = optional_tensor(bias, "bias", size[1:2], x.dtype)
    total = optional_tensor(residual, "residual", size, x.dtype)
    _ops._conv_size(x, w, added, total, geometry)  # raises where they do not fit
    if kind.backward:
        return [_conv_gradient(x, w, geometry, is_of_weight) for is_of_weight in (False, True)]
    call = (x, w, added, total, geometry, ACTIVATIONS.index(activation))
    return [_conv_forward(call, kind.training and needs_before(activation))]


def _conv_gradient(
    x: Tensor, w: Tensor, geometry: Sequence[int], is_of_weight: bool
) -> Iterator[Attempt]:
    # The step is csrc's ConvStep: 0 is the forward, 1 the input's gradient, 2 the weight's.
    engine, why = _ops._conv_other_engine(x, w, geometry, 1 + is_of_weight)
    if engine:
        yield Attempt(without_plan=why, engine=engine)
    else:
        yield Attempt(_ops._conv_backward_plan_key(x, w, geometry, is_of_weight), note=why)


def _conv_forward(call: tuple[Any, ...], with_before: bool) -> Iterator[Attempt]:
    """With less and less of the epilogue in the graph, as a call tries it."""
    x, w, _, _, geometry, _ = call
    engine, why = _ops._conv_other_engine(x, w, geometry, 0)
    if engine:
        yield Attempt(without_plan=why, engine=engine)
        return
    bare = len(_FUSIONS) - 1
    for fusion in range(len(_FUSIONS)):
        reason = _ops._conv_bare_reason(*call, fusion)
        last = bare if reason else fusion
        words = _ops._conv_plan_key(*call, last, with_before)
        yield Attempt(words, fused=_FUSIONS[last], not_more=reason, note=why)
        if last == bare:
            return


def _families() -> Iterator[Operator]:
    yield Operator(
        "sdpa",
        scaled_dot_product_attention,
        ("query", "key", "value"),
        _attention,
        without_effect=("scale", "enable_gqa", "rng_state"),
        questions=("grad_mask",),
        has_polymorphic=True,
    )
    yield Operator(
        "sdpa_fp8",
        sdpa_fp8,
        ("query", "key", "value"),
        _attention_fp8,
        without_effect=("descale_q", "descale_k", "descale_v", "scale_o", "scale"),
        has_backward=False,
    )
    yield Operator(
        "sdpa_fp8_backward",
        sdpa_fp8_backward,
        ("query", "key", "value"),
        _attention_fp8_backward,
        without_effect=(
            *("out", "lse", "descale_q", "descale_k", "descale_v", "descale_o", "descale_do"),
            *("scale_dp", "scale"),
        ),
        has_backward=False,
        is_backward=True,
    )
    yield Operator(
        "sdpa_mxfp8",
        sdpa_mxfp8,
        ("query", "key", "value"),
        _attention_mxfp8,
        without_effect=("descale_q", "descale_k", "descale_v", "scale"),
        has_backward=False,
    )
    yield Operator(
        "varlen_attention",
        varlen_attention,
        ("q", "k", "v"),
        _packed,
        without_effect=("softmax_scale", "rng_state"),
        has_exact=False,
        has_polymorphic=True,
    )
    yield Operator(
        "varlen_attention_fp8",
        varlen_attention_fp8,
        ("q", "k", "v"),
        _packed_fp8,
        without_effect=("descale_q", "descale_k", "descale_v", "scale_o", "softmax_scale"),
        has_backward=False,
        has_exact=False,
        has_polymorphic=True,
    )
    yield Operator(
        "paged_attention",
        paged_attention,
        ("query", "key_cache", "value_cache"),
        _paged,
        required=2,
        without_effect=("scale", "seq_lens_kv", "descale_k", "descale_v", "plan", "out"),
        has_backward=False,
        has_exact=False,
        has_polymorphic=True,
    )
    for function in (rms_norm, layer_norm, add_rms_norm, add_layer_norm):
        yield Operator(
            function.__name__,
            function,
            ("input",),
            partial(_norm, is_layer=function in (layer_norm, add_layer_norm)),
            without_effect=("eps", "residual"),
            training="with_stats",
        )
    yield Operator(
        "batch_norm",
        batch_norm,
        ("input",),
        _batch_norm,
        without_effect=("momentum", "eps"),
        questions=("channels_last",),
        training="training",
    )
    convolutions: list[tuple[Callable[..., Parts], list[Callable[..., Tensor]]]] = [
        (_conv, [conv1d, conv2d, conv3d]),
        (_conv_transpose, [conv_transpose1d, conv_transpose2d, conv_transpose3d]),
    ]
    for plans, functions in convolutions:
        for dims, convolution in enumerate(functions, 1):
            yield Operator(
                convolution.__name__,
                convolution,
                ("input", "weight"),
                partial(plans, dims=dims),
                required=2,
                training="with_before",
            )
    yield Operator(
        "linear",
        linear,
        ("input", "weight"),
        linear_parts,
        required=2,
        questions=("graph",),
        training="with_before",
    )
    yield Operator(
        "mlp",
        mlp,
        ("x", "w1", "w2"),
        mlp_parts,
        required=3,
        questions=("graph",),
        training="with_saved",
    )


def _table() -> Iterator[Operator]:
    for operator in _families():
        yield operator
        if operator.has_backward:
            yield replace(operator, name=f"{operator.name}_backward", is_backward=True)


#: Every operator that can be asked about, by its name; a backward is one of its own.
OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _table()}

#: Those of rows.
NORMS = tuple(op for op in OPERATORS if "norm" in op and not op.startswith("batch_norm"))
CONVS = tuple(op for op in OPERATORS if op.startswith("conv"))


def find_operator(op: str) -> Operator:
    """The entry of the table.

    Raises:
        ValueError: there is none; the message has all names.
    """
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(OPERATORS)}, got {op!r}")
    return OPERATORS[op]
