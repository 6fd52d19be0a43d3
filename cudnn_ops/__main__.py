"""``python -m cudnn_ops``: what cuDNN takes, the plans on disk, and measuring engines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from cudnn_ops import support
from cudnn_ops.plans import cache
from cudnn_ops.plans.norm_tuning import tune_norms, write_table
from cudnn_ops.plans.tables import EngineTable
from cudnn_ops.plans.tune import tune_sdpa, tune_standard_shapes
from cudnn_ops.support import table as support_table

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LAYOUTS = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1 or max(shape) >= 2**31:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not batch,heads,length,head_size, such as 4,32,2048,128"
        )
    return shape


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _tensors(args: argparse.Namespace) -> list[torch.Tensor | None]:
    def tensor(shape: tuple[int, ...] | None) -> torch.Tensor | None:
        if shape is None:
            return None
        order = _LAYOUTS[args.layout]  # outermost in memory first; both are their own inverse
        memory = [shape[dim] for dim in order]
        return torch.empty(memory, dtype=_DTYPES[args.dtype], device="meta").permute(order)

    return [tensor(shape) for shape in (args.q, args.k, args.v)]


def _explain(args: argparse.Namespace) -> int:
    explanation = support.explain(
        args.op,
        *_tensors(args),
        is_causal=args.causal,
        with_lse=args.lse,
        polymorphic=args.polymorphic,
        device=args.device,
        **_features(args),
    )
    print(explanation)
    return 0 if explanation.supported else 1


def _features(args: argparse.Namespace) -> dict[str, Any]:
    """What stands between the products of attention, as `support.explain` takes it."""
    features = {
        "window_size": tuple(args.window),
        "bottom_right": args.bottom_right,
        "softcap": args.softcap,
        "alibi_slopes": args.alibi,
        "sinks": args.sinks,
        "dropout_p": args.dropout,
        "seq_lens_q": args.padding,
        "seq_lens_kv": args.padding,
        "deterministic": args.deterministic,
    }
    if args.mask:
        dtype = torch.bool if args.mask_dtype == "bool" else _DTYPES[args.mask_dtype]
        features |= {"attn_mask": (args.mask, dtype), "grad_mask": args.grad_mask}
    return features


def _support(args: argparse.Namespace) -> int:
    refused = []

    def noted(answers: Iterable[support_table.Answer]) -> Iterator[support_table.Answer]:
        for answer in answers:
            if not answer.supported:
                refused.append(answer)
            yield answer

    answers = support_table.support_table(args.device, progress=sys.stderr.isatty())
    rows = support_table.as_markdown if args.markdown else support_table.as_text
    for row in rows(support_table.as_lines(noted(answers))):
        # Each as soon as it is known: all take minutes. Above the bar where there is one.
        tqdm.write(row, file=sys.stdout)
        sys.stdout.flush()
    for answer in refused if args.reasons else ():
        sizes = "/".join(map(str, answer.head_sizes))
        print(f"{answer.direction}, {answer.feature}, {sizes}: {answer.reason}")
    return 0


def _describe_device(args: argparse.Namespace) -> int:
    print(support.describe_device(args.index))
    return 0


def _cache_info(args: argparse.Namespace) -> int:
    info = cache.store_info()
    if not info.folder:
        print("no store: CUDNN_OPS_CACHE_DIR is empty")
        return 0
    print(f"folder: {info.folder}")
    if info.refusal:
        print(f"not used: {info.refusal}")
    print(f"plans:  {info.files}\nbytes:  {info.bytes:,} of at most {info.limit:,}")
    return 0


def _cache_clear(args: argparse.Namespace) -> int:
    print(f"{cache.store_clear()} plans deleted")
    return 0


def _table_to_extend(path: Path) -> EngineTable:
    """The table there, or a new one: looked at before minutes of measuring, not after."""
    table = EngineTable.of_this_machine()
    if not path.exists():
        return table
    try:
        kept = EngineTable.read(path)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--table: {path} is not a table of engines ({error})") from error
    if (kept.gpu, kept.cudnn) != (table.gpu, table.cudnn):
        raise ValueError(
            f"{path} is of {kept.gpu} and cuDNN {kept.cudnn}, this is {table.gpu} and "
            f"{table.cudnn}; write another file"
        )
    table.entries = kept.entries
    return table


def _tune(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("engines are measured on a GPU, and torch sees none")
    if args.table and not args.table.parent.is_dir():
        raise ValueError(f"--table: {args.table.parent} is not a folder")
    if args.op == "norms":
        timings = tune_norms(workers=args.workers)
        print(*timings, sep="\n")
        if args.table:
            write_table(args.table, timings)
        return 0
    table = _table_to_extend(args.table) if args.table else None
    if args.standard:
        tuned = tune_standard_shapes()
    else:
        tuned = tune_sdpa(
            *_tensors(args),  # type: ignore[arg-type]
            is_causal=args.causal,
            training=not args.inference,
        )
    for plan in tuned:
        print(plan)
    if table:
        for plan in tuned:
            table.add(plan)
        table.write(args.table)
        print(f"{len(table.entries)} plans in {args.table}")
    return 0


def _add_tensors(parser: argparse.ArgumentParser) -> None:
    shape_help = "batch,heads,length,head_size (default: %(default)s)"
    parser.add_argument("-q", type=_parse_shape, default=(4, 32, 2048, 128), help=shape_help)
    parser.add_argument("-k", type=_parse_shape, help="the key's shape (default: the query's)")
    parser.add_argument("-v", type=_parse_shape, help="the value's shape (default: the key's)")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument(
        "--layout", choices=_LAYOUTS, default="bshd", help="order in memory (default: bshd)"
    )
    parser.add_argument("--causal", action="store_true")


def _add_features(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("features of attention")
    window_help = "keys that a query sees on either side of its own; -1: all"
    group.add_argument(
        "--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), default=(-1, -1), help=window_help
    )
    group.add_argument("--bottom-right", action="store_true", help="align the last query and key")
    group.add_argument("--mask", type=_parse_shape, help="the shape of attn_mask")
    group.add_argument("--mask-dtype", choices=["bool", *_DTYPES], default="bf16")
    group.add_argument("--grad-mask", action="store_true", help="the mask's gradient too")
    group.add_argument("--softcap", type=float, default=0.0, metavar="CAP")
    group.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    group.add_argument("--sinks", action="store_true", help="a learned logit a head")
    group.add_argument("--dropout", type=float, default=0.0, metavar="P")
    group.add_argument("--padding", action="store_true", help="lengths of each sequence")
    group.add_argument("--deterministic", action="store_true")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="current",
        help=f"current, {', '.join(support.devices())}, or a description's path (default: current)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cudnn_ops", description=__doc__)
    commands = parser.add_subparsers(required=True)

    explain = commands.add_parser(
        "explain",
        help="does cuDNN take this call on that GPU?",
        description="Builds the cuDNN plan of a call, on any machine, and prints cuDNN's answer. "
        "Exits with 1 if cuDNN refuses.",
    )
    explain.add_argument("op", choices=["sdpa", "sdpa_backward"])
    _add_tensors(explain)
    explain.add_argument("--lse", action="store_true", help="store the log-sum-exp (training)")
    explain.add_argument(
        "--polymorphic", action="store_true", help="the plan that serves other lengths too"
    )
    _add_features(explain)
    _add_device(explain)
    explain.set_defaults(run=_explain)

    table = commands.add_parser(
        "support",
        help="which features of attention does cuDNN take on that GPU?",
        description="Builds a plan for every feature of attention at every head size, forward and "
        'backward, on any machine; takes a minute. "forward" stands for no backward.',
    )
    _add_device(table)
    table.add_argument("--markdown", action="store_true", help="print it as a README has it")
    table.add_argument("--reasons", action="store_true", help="also why cuDNN refuses")
    table.set_defaults(run=_support)

    describe = commands.add_parser(
        "describe-device", help="print the JSON description of the live GPU, for explain --device"
    )
    describe.add_argument("index", type=int, nargs="?", default=0)
    describe.set_defaults(run=_describe_device)

    store = commands.add_parser("cache", help="the plans on disk").add_subparsers(required=True)
    info = store.add_parser("info", help="where they are and how much there is")
    info.set_defaults(run=_cache_info)
    clear = store.add_parser("clear", help="delete them")
    clear.set_defaults(run=_cache_clear)

    tune = commands.add_parser(
        "tune",
        help="measure cuDNN's engines for a call",
        description="Times every engine that cuDNN offers for a call, forward and backward, on the "
        "live GPU, and stores the fastest plans. Of norms: for rows of all sizes, and our kernels "
        "too.",
    )
    tune.add_argument("op", choices=["sdpa", "norms"])
    _add_tensors(tune)
    tune.add_argument(
        "--standard", action="store_true", help="the shapes that the package's table is made from"
    )
    tune.add_argument("--inference", action="store_true", help="the forward without a gradient")
    tune.add_argument(
        "--table",
        type=Path,
        help="also note in this JSON file the engines that beat cuDNN's choice",
    )
    tune.add_argument(
        "--workers",
        type=_parse_count,
        default=max(1, (os.cpu_count() or 1) - 2),
        metavar="N",
        help="of norms: processes that try engines at once (default: %(default)s)",
    )
    tune.set_defaults(run=_tune)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
