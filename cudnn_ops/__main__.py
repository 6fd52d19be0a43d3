"""``python -m cudnn_ops``: asks from the shell what :mod:`cudnn_ops.support` answers."""

from __future__ import annotations

import argparse
import sys

import torch

from cudnn_ops import support

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LAYOUTS = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3)}


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not batch,heads,length,head_size, such as 4,32,2048,128"
        )
    return shape


def _explain(args: argparse.Namespace) -> int:
    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        order = _LAYOUTS[args.layout]  # outermost in memory first; both are their own inverse
        memory = [shape[dim] for dim in order]
        return torch.empty(memory, dtype=_DTYPES[args.dtype], device="meta").permute(order)

    q = tensor(args.q)
    k = tensor(args.k) if args.k else None
    v = tensor(args.v) if args.v else None
    explanation = support.explain(
        args.op, q, k, v, is_causal=args.causal, with_lse=args.lse, device=args.device
    )
    print(explanation)
    return 0 if explanation.supported else 1


def _describe_device(args: argparse.Namespace) -> int:
    print(support.describe_device(args.index))
    return 0


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
    shape_help = "batch,heads,length,head_size (default: %(default)s)"
    explain.add_argument("-q", type=_parse_shape, default=(4, 32, 2048, 128), help=shape_help)
    explain.add_argument("-k", type=_parse_shape, help="the key's shape (default: the query's)")
    explain.add_argument("-v", type=_parse_shape, help="the value's shape (default: the key's)")
    explain.add_argument("--dtype", choices=_DTYPES, default="bf16")
    explain.add_argument(
        "--layout", choices=_LAYOUTS, default="bshd", help="order in memory (default: bshd)"
    )
    explain.add_argument("--causal", action="store_true")
    explain.add_argument("--lse", action="store_true", help="store the log-sum-exp (training)")
    explain.add_argument(
        "--device",
        default="current",
        help=f"current, {', '.join(support.devices())}, or a description's path (default: current)",
    )
    explain.set_defaults(run=_explain)

    describe = commands.add_parser(
        "describe-device", help="print the JSON description of the live GPU, for explain --device"
    )
    describe.add_argument("index", type=int, nargs="?", default=0)
    describe.set_defaults(run=_describe_device)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
