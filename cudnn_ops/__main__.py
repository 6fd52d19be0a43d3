"""``python -m cudnn_ops``: what cuDNN supports, the plans on disk, measuring, and a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from cudnn_ops import support
from cudnn_ops.collect_env import collect_env
from cudnn_ops.plans import cache
from cudnn_ops.plans.bench import add_bench
from cudnn_ops.plans.bundle_command import add_bundle
from cudnn_ops.plans.linear_tuning import tune_linear, write_linear_table
from cudnn_ops.plans.norm_tuning import tune_norms, write_table
from cudnn_ops.plans.tables import EngineTable
from cudnn_ops.plans.tune import tune_sdpa, tune_standard_shapes
from cudnn_ops.server.command import add_serve
from cudnn_ops.support import command_line
from cudnn_ops.support import table as support_table

_SDPA = command_line.arguments_of(support.OPERATORS["sdpa"])


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _explain(args: argparse.Namespace) -> int:
    operator = support.OPERATORS[args.op]
    explanation = support.explain(
        args.op,
        *command_line.tensors(args, command_line.arguments_of(operator)),
        device=args.device,
        **command_line.options(args, operator),
    )
    print(explanation)
    return 0 if explanation.supported else 1


def _support(args: argparse.Namespace) -> int:
    from tqdm.auto import tqdm

    noted = []

    def taking_notes(answers: Iterable[support_table.Answer]) -> Iterator[support_table.Answer]:
        for answer in answers:
            if answer.reason:
                noted.append(answer)
            yield answer

    table = support_table.TABLES[args.table]
    answers = support_table.support_table(args.device, table, progress=sys.stderr.isatty())
    lines = support_table.as_lines(taking_notes(answers), table)
    as_markdown, as_text = support_table.as_markdown, support_table.as_text
    for row in as_markdown(lines) if args.markdown else as_text(lines, table):
        # Each as soon as it is known: all take minutes. Above the bar where there is one.
        tqdm.write(row, file=sys.stdout)
        sys.stdout.flush()
    for answer in noted if args.reasons else ():
        print(f"{answer.direction}, {answer.row}, {answer.column}: {answer.reason}")
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
    if args.op == "linear":
        products = tune_linear()
        print(*products, sep="\n")
        if args.table:
            write_linear_table(args.table, products)
        return 0
    table = _table_to_extend(args.table) if args.table else None
    if args.standard:
        tuned = tune_standard_shapes()
    else:
        tuned = tune_sdpa(
            *command_line.tensors(args, _SDPA),  # type: ignore[arg-type]
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


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="current",
        help=f"current, {', '.join(support.devices())}, or a description's path (default: current)",
    )


class _Versions(argparse.Action):
    """Prints the versions of what computes, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        environment = collect_env()
        for name in ("cudnn_ops", "torch", "cuDNN loaded", "built against cuDNN Frontend"):
            print(f"{name}: {environment[name]}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cudnn_ops", description=__doc__)
    parser.add_argument(
        "--version",
        action=_Versions,
        nargs=0,
        help="print the versions of cudnn_ops, torch, cuDNN and cuDNN Frontend",
    )
    commands = parser.add_subparsers(required=True)

    explain = commands.add_parser(
        "explain",
        help="does cuDNN support this call on that GPU?",
        description="Builds the cuDNN plan of a call, on any machine, and prints cuDNN's answer. "
        "Exits with 1 if cuDNN refuses.",
    )
    command_line.add_operators(explain, _add_device)
    explain.set_defaults(run=_explain)

    table = commands.add_parser(
        "support",
        help="what does cuDNN support on that GPU?",
        description="Builds a plan for every cell of a table, forward and backward, on any "
        'machine; takes minutes. "forward" stands for no backward.',
    )
    table.add_argument(
        "table", choices=support_table.TABLES, nargs="?", default="attention", help="of what"
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

    add_bundle(commands, _add_device)
    add_bench(commands)
    add_serve(commands)

    tune = commands.add_parser(
        "tune",
        help="measure cuDNN's engines for a call",
        description="Times every engine that cuDNN offers for a call, forward and backward, on the "
        "live GPU, and stores the fastest plans. Of norms: for rows of all sizes, and our kernels "
        "too. Of linear layers: cuDNN's graphs, cuBLASLt's epilogues and our kernels, for products "
        "of all sizes.",
    )
    tune.add_argument("op", choices=["sdpa", "norms", "linear"])
    command_line.add_shapes(tune, _SDPA)
    tune.add_argument("--causal", action="store_true")
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
