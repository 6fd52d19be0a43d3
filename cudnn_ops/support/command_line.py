"""The arguments of ``python -m cudnn_ops explain``: each operator's own, from a table."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from cudnn_ops.ops.activation import ACTIVATIONS
from cudnn_ops.ops.batch_norm import BatchNormActivation
from cudnn_ops.support.operators import OPERATORS, Operator

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Option(NamedTuple):
    """One option of a call."""

    flags: tuple[str, ...]
    argument: str
    """The argument of the operator, or several, separated by spaces."""
    settings: dict[str, Any]
    """What argparse accepts; without any it is a flag."""


class Shape(NamedTuple):
    """A tensor of a call by its shape."""

    flags: tuple[str, ...]
    labels: str
    default: tuple[int, ...] | None
    """None: like the one before."""


class Arguments(NamedTuple):
    """What an operator has on the command line."""

    shapes: tuple[Shape, ...]
    """q, k and v."""
    options: tuple[Option, ...]
    layouts: dict[str, tuple[int, ...]] | None = None
    """Orders of q, k and v in memory, outermost dimension first; the first one is the default."""
    dtypes: tuple[str, ...] = ("fp16", "bf16")


def parse_shape(labels: str) -> Any:
    """A parser of as many numbers as there are labels."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            shape = tuple(int(part) for part in text.split(","))
        except ValueError:
            shape = ()
        if len(shape) != labels.count(",") + 1 or min(shape) < 1 or max(shape) >= 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is not {labels}, in whole numbers from 1")
        return shape

    return parse


def _flag(name: str, argument: str, help: str = "") -> Option:
    return Option((f"--{name}",), argument, {"action": "store_true", "help": help or None})


def _value(name: str, argument: str, kind: type, metavar: str, help: str = "") -> Option:
    settings = {"type": kind, "metavar": metavar, "help": help or None}
    return Option((f"--{name}",), argument, settings)


def _shape(name: str, argument: str, labels: str, help: str) -> Option:
    settings = {"type": parse_shape(labels), "metavar": labels.upper(), "help": help}
    return Option((f"--{name}",), argument, settings)


_WINDOW = Option(
    ("--window",),
    "window_size",
    {
        "type": int,
        "nargs": 2,
        "metavar": ("LEFT", "RIGHT"),
        "help": "keys that a query sees on either side of its own; -1: all",
    },
)
_SOFTCAP = _value("softcap", "softcap", float, "CAP")
_SINKS = _flag("sinks", "sinks", "a learned logit for each head")
_ALIBI = _flag("alibi", "alibi_slopes", "ALiBi slopes")
_DROPOUT = _value("dropout", "dropout_p", float, "P")
_DETERMINISTIC = _flag("deterministic", "deterministic")
_TOP_LEFT = Option(
    ("--top-left",),
    "bottom_right",
    {"action": "store_false", "help": "align the first query and key, not the last"},
)

_DENSE = "batch,heads,length,head_size"
_SDPA = Arguments(
    shapes=(
        Shape(("-q", "--query"), _DENSE, (4, 32, 2048, 128)),
        Shape(("-k", "--key"), _DENSE, None),
        Shape(("-v", "--value"), _DENSE, None),
    ),
    options=(
        _flag("causal", "is_causal"),
        _WINDOW,
        _flag("bottom-right", "bottom_right", "align the last query and key"),
        _shape("mask", "attn_mask", _DENSE, "the shape of attn_mask"),
        Option(("--mask-dtype",), "mask_dtype", {"choices": ["bool", *DTYPES], "default": "bf16"}),
        _flag("grad-mask", "grad_mask", "the mask's gradient too"),
        _SOFTCAP,
        _ALIBI,
        _SINKS,
        _DROPOUT,
        _flag("padding", "seq_lens_q seq_lens_kv", "a length for each sequence"),
        _DETERMINISTIC,
        _flag("polymorphic", "polymorphic", "the plan that serves other lengths too"),
    ),
    layouts={"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)},
)
_SDPA_FP8 = Arguments(
    shapes=_SDPA.shapes,
    options=(
        _flag("causal", "is_causal"),
        _WINDOW,
        _flag("bottom-right", "bottom_right", "align the last query and key"),
        _flag("padding", "seq_lens_q seq_lens_kv", "a length for each sequence"),
        Option(("--out-dtype",), "out_dtype", {"choices": ["fp16", "bf16", *_FP8]}),
        _flag("lse", "with_lse", "the log-sum-exp too"),
    ),
    layouts=_SDPA.layouts,
    dtypes=tuple(_FP8),
)
_SDPA_FP8_BACKWARD = Arguments(
    shapes=_SDPA.shapes,
    options=(
        *_SDPA_FP8.options[:4],
        Option(("--grad-out-dtype",), "grad_out", {"choices": [*_FP8]}),
        Option(("--grad-dtype",), "grad_dtype", {"choices": ["fp16", "bf16"]}),
    ),
    layouts=_SDPA.layouts,
    dtypes=tuple(_FP8),
)
_SDPA_MXFP8 = Arguments(
    shapes=_SDPA.shapes,
    options=(
        *_SDPA_FP8.options[:3],
        Option(("--out-dtype",), "out_dtype", {"choices": ["fp16", "bf16"]}),
    ),
    layouts=_SDPA.layouts,
    dtypes=tuple(_FP8),
)
_PACKED = "tokens,heads,head_size"
_VARLEN = Arguments(
    shapes=(
        Shape(("-q",), _PACKED, (8192, 32, 128)),
        Shape(("-k",), _PACKED, None),
        Shape(("-v",), _PACKED, None),
    ),
    options=(
        Option(
            ("--sequences",),
            "cu_seqlens_q",
            {"type": int, "default": 4, "help": "how many sequences (default: %(default)s)"},
        ),
        _value("max-length", "max_seqlen_q", int, "TOKENS", "of a sequence of queries"),
        _value("max-length-kv", "max_seqlen_k", int, "TOKENS", "of a sequence of keys"),
        _flag("causal", "causal"),
        _WINDOW,
        _TOP_LEFT,
        _SOFTCAP,
        _ALIBI,
        _SINKS,
        _DROPOUT,
        _flag("used", "seqused_q seqused_k", "how much of each sequence is used"),
        _DETERMINISTIC,
    ),
)
_VARLEN_FP8 = Arguments(
    shapes=_VARLEN.shapes,
    options=(
        *_VARLEN.options[:3],
        _flag("causal", "causal"),
        _WINDOW,
        _TOP_LEFT,
        _flag("used", "seqused_q seqused_k", "how much of each sequence is used"),
        Option(("--out-dtype",), "out_dtype", {"choices": ["fp16", "bf16", *_FP8]}),
    ),
    dtypes=tuple(_FP8),
)
_PAGES = "pages,page_size,heads_kv,head_size"
_PAGED = Arguments(
    shapes=(
        Shape(("-q", "--query"), "batch,queries,heads,head_size", (32, 1, 32, 128)),
        Shape(("-k", "--key-cache"), _PAGES, (4096, 16, 8, 128)),
        Shape(("-v", "--value-cache"), _PAGES, None),
    ),
    options=(
        Option(
            ("--page-table",),
            "page_table",
            {
                "type": parse_shape("batch,pages"),
                "default": (32, 128),
                "metavar": "BATCH,PAGES",
                "help": "its shape (default: %(default)s)",
            },
        ),
        _flag("causal", "is_causal"),
        _WINDOW,
        _TOP_LEFT,
        _SOFTCAP,
        _SINKS,
        Option(("--kv-layout",), "kv_layout", {"choices": ["NHD", "HND"], "help": "of a page"}),
    ),
)


def _norm_arguments(is_layer: bool) -> Arguments:
    return Arguments(
        shapes=(Shape(("-q", "--input"), "rows,size", (8192, 4096)),),
        options=(
            Option(
                ("--weight-dtype",),
                "weight",
                {"choices": ["none", *DTYPES], "help": "(default: that of the input)"},
            ),
            *([_flag("bias", "bias")] if is_layer else []),
            _flag("zero-centered", "zero_centered", "the weight is added to 1"),
        ),
        dtypes=("fp16", "bf16", "fp32"),
    )


_BATCH_NORM = Arguments(
    shapes=(Shape(("-q", "--input"), "N,C,H,W", (256, 64, 56, 56)),),
    options=(
        Option(("--activation",), "activation", {"choices": get_args(BatchNormActivation)}),
        _flag("residual", "residual"),
        _flag("channels-last", "channels_last", "in memory, the order that cuDNN's engines have"),
    ),
    dtypes=("fp16", "bf16", "fp32"),
)


def _conv_arguments(dims: int, *, is_transposed: bool = False) -> Arguments:
    space, kernel = ",".join("DHW"[-dims:]), ",".join("TRS"[-dims:])
    size = (1024, 56, 16)[dims - 1]
    per_dimension = {"type": int, "nargs": "+", "metavar": "N"}
    sizes = "C,K/groups" if is_transposed else "K,C/groups"
    extra = Option(("--output-padding",), "output_padding", per_dimension)
    return Arguments(
        shapes=(
            Shape(("-q", "--input"), f"N,C,{space}", (32, 64, *[size] * dims)),
            Shape(("-k", "--weight"), f"{sizes},{kernel}", (64, 64, *[3] * dims)),
        ),
        options=(
            Option(("--stride",), "stride", per_dimension),
            Option(("--padding",), "padding", per_dimension),
            *((extra,) if is_transposed else ()),
            Option(("--dilation",), "dilation", per_dimension),
            _value("groups", "groups", int, "N"),
            _ACTIVATION,
            _flag("bias", "bias"),
            _flag("residual", "residual"),
        ),
        dtypes=("fp16", "bf16", "fp32"),
    )


_ACTIVATION = Option(("--activation",), "activation", {"choices": ACTIVATIONS})
_GRAPH = _flag("graph", "graph", "cuDNN's graph, whatever else may be faster")
_LINEAR = Arguments(
    shapes=(
        Shape(("-q", "--input"), "rows,inputs", (8192, 4096)),
        Shape(("-k", "--weight"), "outputs,inputs", (16384, 4096)),
    ),
    options=(_ACTIVATION, _flag("bias", "bias"), _flag("residual", "residual"), _GRAPH),
    dtypes=("fp16", "bf16", "fp32"),
)
_MLP = Arguments(
    shapes=(
        Shape(("-q", "--input"), "rows,inputs", (8192, 4096)),
        Shape(("-k", "--w1"), "hidden,inputs", (16384, 4096)),
        Shape(("-v", "--w2"), "outputs,hidden", (4096, 16384)),
    ),
    options=(
        _ACTIVATION,
        _flag("bias", "b1 b2"),
        _flag("gated", "gated", "w1 has the rows of a gate, then those of what it multiplies"),
        _GRAPH,
    ),
    dtypes=("fp16", "bf16", "fp32"),
)

_ARGUMENTS = {
    "sdpa": _SDPA,
    "sdpa_fp8": _SDPA_FP8,
    "sdpa_fp8_backward": _SDPA_FP8_BACKWARD,
    "sdpa_mxfp8": _SDPA_MXFP8,
    "varlen_attention": _VARLEN,
    "varlen_attention_fp8": _VARLEN_FP8,
    "paged_attention": _PAGED,
    "rms_norm": _norm_arguments(is_layer=False),
    "layer_norm": _norm_arguments(is_layer=True),
    "batch_norm": _BATCH_NORM,
    "conv1d": _conv_arguments(1),
    "conv2d": _conv_arguments(2),
    "conv3d": _conv_arguments(3),
    "conv_transpose1d": _conv_arguments(1, is_transposed=True),
    "conv_transpose2d": _conv_arguments(2, is_transposed=True),
    "conv_transpose3d": _conv_arguments(3, is_transposed=True),
    "linear": _LINEAR,
    "mlp": _MLP,
}


def arguments_of(operator: Operator) -> Arguments:
    """What an operator, or a backward, has on the command line."""
    name = operator.name.removeprefix("add_")
    return _ARGUMENTS.get(name) or _ARGUMENTS[name.removesuffix("_backward")]


def add_shapes(
    parser: argparse.ArgumentParser, arguments: Arguments, *, many: bool = False
) -> None:
    """Adds shapes, dtype and layout; with ``many`` each shape may be several (:func:`cases`)."""
    for shape, name in zip(arguments.shapes, "qkv", strict=False):
        default = ",".join(map(str, shape.default or ())) or "like the one before"
        several: dict[str, Any] = {"nargs": "+"} if many else {}
        parser.add_argument(
            *shape.flags,
            dest=name,
            type=parse_shape(shape.labels),
            default=[shape.default] if many and shape.default else shape.default,
            **several,
            metavar="N,...",
            help=f"{shape.labels} (default: {default})",
        )
    default_dtype = "bf16" if "bf16" in arguments.dtypes else arguments.dtypes[0]
    parser.add_argument("--dtype", choices=arguments.dtypes, default=default_dtype)
    if arguments.layouts:
        names = list(arguments.layouts)
        parser.add_argument(
            "--layout", choices=names, default=names[0], help=f"in memory (default: {names[0]})"
        )


def add_operators(parser: argparse.ArgumentParser, add_common: Any) -> None:
    """Adds a parser for each operator, with its options and those of ``add_common``."""
    commands = parser.add_subparsers(dest="op", required=True, metavar="operator")
    for operator in OPERATORS.values():
        arguments = arguments_of(operator)
        command = commands.add_parser(operator.name, help=None, description=parser.description)
        add_shapes(command, arguments)
        for option in arguments.options:
            # What is not given is not passed on: the operator has its own default.
            settings = {"default": argparse.SUPPRESS} | option.settings
            command.add_argument(*option.flags, dest=option.argument, **settings)
        if not operator.is_backward and operator.has_backward:
            command.add_argument(
                *(("--lse",) if operator.training == "with_lse" else ()),
                "--training",
                dest=operator.training,
                action="store_true",
                help="the forward that a backward follows",
            )
        add_common(command)


def tensors(args: argparse.Namespace, arguments: Arguments) -> list[Tensor | None]:
    """q, k and v as they were described, without data."""

    def tensor(shape: tuple[int, ...] | None) -> Tensor | None:
        if shape is None:
            return None
        order = arguments.layouts[args.layout] if arguments.layouts else range(len(shape))
        memory = [shape[dim] for dim in order]  # each order is its own inverse
        dtype = (DTYPES | _FP8)[args.dtype]
        return torch.empty(memory, dtype=dtype, device="meta").permute(*order)

    return [tensor(getattr(args, name, None)) for name in "qkv"[: len(arguments.shapes)]]


def cases(
    args: argparse.Namespace, arguments: Arguments
) -> Iterator[tuple[str, list[Tensor | None]]]:
    """The name of each case, and its :func:`tensors`: as many as the first one has shapes.

    Raises:
        ValueError: another one has neither one shape nor as many.
    """
    names = "qkv"[: len(arguments.shapes)]
    lists = {name: getattr(args, name, None) or [None] for name in names}
    count = len(lists["q"])
    for name, shapes in lists.items():
        if len(shapes) not in (1, count):
            raise ValueError(f"-{name} needs one shape or {count}, as -q has, got {len(shapes)}")
    for index in range(count):
        shapes = [lists[name][index if len(lists[name]) > 1 else 0] for name in names]
        chosen = vars(args) | dict(zip(names, shapes, strict=True))
        label = " x ".join(",".join(map(str, shape)) for shape in shapes if shape)
        yield label, tensors(argparse.Namespace(**chosen), arguments)


def options(args: argparse.Namespace, operator: Operator) -> dict[str, Any]:
    """The options that were given, as :func:`~cudnn_ops.support.explain` accepts them."""
    given = vars(args)
    result: dict[str, Any] = {}
    for option in arguments_of(operator).options:
        if option.argument in given:
            result |= dict.fromkeys(option.argument.split(), given[option.argument])
    if operator.training in given:
        result[operator.training] = given[operator.training]
    mask_dtype = result.pop("mask_dtype", None)
    if "attn_mask" in result:
        dtype = torch.bool if mask_dtype == "bool" else DTYPES[str(mask_dtype)]
        result["attn_mask"] = (result["attn_mask"], dtype)
    if "weight" in result:
        result["weight"] = DTYPES.get(result["weight"])
    for name in ("out_dtype", "grad_out", "grad_dtype"):
        if name in result:
            result[name] = (DTYPES | _FP8)[result[name]]
    return {
        name: tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for name, value in result.items()
    }
