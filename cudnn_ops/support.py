"""What cuDNN takes, on the GPU that is there or on one that is described by a file.

``explain`` builds the very plan that a call would build, with the real libcudnn, on any
machine: where there is no GPU driver, a stub of one that comes with the package lets cuDNN
compile its kernels all the same.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cudnn_ops import _C
from cudnn_ops.ops.conv import ACTIVATIONS, as_list
from cudnn_ops.ops.paged import KVLayout, is_head_major

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


def devices() -> list[str]:
    """Names of the GPUs whose descriptions come with the package."""
    folder = resources.files("cudnn_ops") / "devices"
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir())


def explain(
    op: str,
    q: TensorSpec,
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
            strides in elements.
        k: the key; None stands for one like the query.
        v: the value; None stands for one like the key.
        with_lse: whether the forward also stores the log-sum-exp, as it does in training.
        polymorphic: asks about the plan that serves other batch sizes and lengths too
            (:mod:`cudnn_ops.policy`), not about the one for these sizes alone.
        device: ``"current"`` for the live GPU, a name of :func:`devices`, or the path of a
            file that :func:`describe_device` wrote.
        options: as in :func:`cudnn_ops.scaled_dot_product_attention`, but that what a tensor holds
            does not matter: ``attn_mask`` may be ``(shape, dtype)``, and ``alibi_slopes``,
            ``sinks``, ``seq_lens_q`` and ``seq_lens_kv`` may be True. ``grad_mask=True`` asks for
            the gradient of the mask too. For ``"paged_attention"``, where ``k`` and ``v`` are the
            caches, as in :func:`cudnn_ops.paged_attention`: ``page_table`` may be its shape, and
            ``cu_seqlens_q`` and ``sinks`` True. For a norm ``normalized_shape`` (None: the last
            dimension), ``weight`` and ``bias`` (True, or a dtype), ``zero_centered``, and
            ``with_stats`` for the forward that a backward follows. For a convolution, where ``q``
            is the input and ``k`` the weight, ``stride``, ``padding``, ``dilation``, ``groups``
            and ``activation`` as in :func:`cudnn_ops.conv2d`, ``bias`` and ``residual`` (True);
            ``reason`` then says where cuDNN does not take the whole epilogue and what runs instead.

    Raises:
        ValueError: an unknown op or device; shapes that do not fit each other.
        RuntimeError: no libcudnn can be loaded, or no GPU is there for ``"current"``.
    """
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


def describe_device(index: int = 0) -> str:
    """The description of live GPU ``index``: JSON text, for ``explain(device=...)`` anywhere."""
    prepare("current")
    return _C.describe_device(index)


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
    if op == "paged_attention":
        return _paged_plan_key(q, k, v, with_lse=with_lse, **options), ""
    if op in NORMS:
        return norm_plan_key(op, q, **options), ""
    if op not in ("sdpa", "sdpa_backward"):
        known = ("sdpa", "sdpa_backward", "paged_attention", *NORMS, *CONVS)
        raise ValueError(f"op is one of {', '.join(known)}, got {op!r}")
    query, key, value = meta_tensors(q, k, v)
    if options.get("attn_mask") is not None:
        options["attn_mask"] = _meta_tensor(options["attn_mask"], "attn_mask")
    small = {
        "alibi_slopes": (query.shape[1], torch.float32),
        "sinks": (query.shape[1], torch.float32),
        "seq_lens_q": (query.shape[0], torch.int32),
        "seq_lens_kv": (query.shape[0], torch.int32),
    }
    for name, (size, dtype) in small.items():
        if options.get(name) is True:
            options[name] = torch.empty(size, dtype=dtype, device="meta")
        elif isinstance(options.get(name), Tensor):
            options[name] = options[name].to("meta")
        else:
            options.pop(name, None)
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
    page_table: Tensor | tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | bool | None = None,
    sinks: Tensor | bool | None = None,
    kv_layout: KVLayout = "NHD",
    **options: Any,
) -> Sequence[int]:
    if key_cache is None or page_table is None:
        raise ValueError("paged_attention is asked about with k, the key cache, and page_table")
    query = _meta_tensor(query, "q")
    batch, width = page_table.shape if isinstance(page_table, Tensor) else page_table

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    key_cache = _meta_tensor(key_cache, "k")
    return torch.ops.cudnn_ops._paged_plan_key(
        query,
        key_cache,
        key_cache if value_cache is None else _meta_tensor(value_cache, "v"),
        meta(batch, width),
        meta(batch),
        # A bool is a tensor's place: what it holds does not matter.
        cu_seqlens_q=None if cu_seqlens_q is None or cu_seqlens_q is False else meta(batch + 1),
        sinks=None
        if sinks is None or sinks is False
        else meta(query.shape[-2], dtype=torch.float32),
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
    if op.endswith("_backward"):
        keys = conv_plan_keys(op, input, weight, **options)
        of_input, of_weight = answers = [_C.make_plan(words, description) for words in keys]
        return (
            of_input[0] and of_weight[0],
            "; ".join(answer[1] for answer in answers if answer[1]),
            f"{of_input[2]}, {of_weight[2]}",
            max(of_input[3], of_weight[3]),
        )
    refusal = ""
    for fusion, words in zip(_FUSIONS, conv_plan_keys(op, input, weight, **options), strict=True):
        supported, reason, engine, workspace = _C.make_plan(words, description)
        if supported and refusal:
            reason = f"only {fusion} in one graph, the rest by torch's operators: {refusal}"
        if supported:
            break
        refusal = refusal or reason
    return supported, reason, engine, workspace


def conv_plan_keys(
    op: str,
    input: TensorSpec,
    weight: TensorSpec | None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    activation: str = "none",
    bias: bool = False,
    residual: bool = False,
    with_before: bool = False,
) -> list[Sequence[int]]:
    """The keys of the plans of one of :data:`CONVS`: for less and less fused, or both gradients.

    ``with_before``: what the activation is of is a result too, as training needs it.
    """
    if weight is None:
        raise ValueError(f"{op} needs k, the weight")
    ops = torch.ops.cudnn_ops
    dims = CONVS[op]
    x, w = _meta_tensor(input, "q"), _meta_tensor(weight, "k")
    pads = padding if isinstance(padding, str) else as_list(padding)
    geometry = ops._conv_geometry(dims, w, as_list(stride), pads, as_list(dilation), groups)
    if dims == 1:  # an image of one row
        x, w = x.unsqueeze(2), w.unsqueeze(2)
    if op.endswith("_backward"):
        key = ops._conv_backward_plan_key
        return [key(x, w, geometry, is_of_weight) for is_of_weight in (False, True)]
    size = ops._conv_size(x, w, None, None, geometry)
    added = (
        x.new_empty(w.shape[:1]) if bias else None,
        x.new_empty(size) if residual else None,
    )
    number = ACTIVATIONS.index(activation)
    key = ops._conv_plan_key
    fusions = range(len(_FUSIONS))
    return [key(x, w, *added, geometry, number, fusion, with_before) for fusion in fusions]


def norm_plan_key(
    op: str,
    input: TensorSpec,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight: torch.dtype | bool = True,
    bias: torch.dtype | bool = False,
    zero_centered: bool = False,
    with_stats: bool = False,
) -> Sequence[int]:
    """The key of the plan of one of :data:`NORMS`; arguments as in :func:`explain`."""
    x = _meta_tensor(input, "q")
    shape = x.shape[-1:] if normalized_shape is None else normalized_shape

    def parameter(kind: torch.dtype | bool) -> Tensor | None:
        if kind is False:
            return None
        return torch.empty(shape, dtype=x.dtype if kind is True else kind, device="meta")

    return torch.ops.cudnn_ops._norm_plan_key(
        x,
        shape,
        weight=parameter(weight),
        bias=parameter(bias),
        is_layer=op.startswith("layer"),
        zero_centered=zero_centered,
        with_stats=with_stats,
        backward=op.endswith("_backward"),
    )


def format_cudnn_version(version: int) -> str:
    """``91900`` as ``"9.19.0"``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _description(device: str | Path) -> str:
    if device == "current":
        return "current"
    known = resources.files("cudnn_ops") / "devices" / f"{device}.json"
    if known.is_file():
        return known.read_text()
    path = Path(device)
    if path.is_file():
        return path.read_text()
    raise ValueError(
        f'device {str(device)!r} is not "current", not one of {", ".join(devices())}, and not a '
        "file; `python -m cudnn_ops describe-device` writes one on a machine with a GPU"
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


def prepare(device: str | Path) -> str:
    """Makes sure that cuDNN finds a driver, real or not, and the compiler that it needs.

    Returns what the device is called in C++: "current", or its description.
    """
    description = _description(device)
    if description != "current":
        _load_driver_stub()
        offer_wheels()
    elif not torch.cuda.is_available():
        raise RuntimeError(
            'device="current" asks for a GPU, and torch sees none; describe one instead, '
            f"such as device={devices()[0]!r}"
        )
    return description


@functools.cache
def _load_driver_stub() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Global, so that cuDNN's own look-up by this name finds it; it stays for good.
        stub = Path(__file__).parent / "stub" / "libcuda.so.1"
        ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def offer_wheels() -> None:
    """Where torch has no CUDA, cuDNN and its compiler come from their own wheels, if there."""
    if torch.version.cuda is not None:
        return
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
            for library in sorted(Path(root).glob(f"cu1*/lib/{name}")):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        cudnn = Path(root) / "cudnn" / "lib" / "libcudnn.so.9"
        if cudnn.is_file():
            _C.set_cudnn_fallback_path(str(cudnn))
