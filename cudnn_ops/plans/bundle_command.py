"""``python -m cudnn_ops bundle``: the plans of a run, built ahead of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from cudnn_ops.plans.bundle import build_bundle, described
from cudnn_ops.plans.common import common_requests
from cudnn_ops.plans.packaged import file_name
from cudnn_ops.plans.request_file import load_requests


def add_bundle(commands: argparse._SubParsersAction, add_device: Callable[..., None]) -> None:
    """Adds the command."""
    bundle = commands.add_parser(
        "bundle",
        help="build the plans of a run into one file, without its GPU",
        description="Builds cuDNN's plans for a GPU, which need not be there, and writes them to "
        "one file for cudnn_ops.load_bundle. Exits with 1 if cuDNN refuses one.",
    )
    which = bundle.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--from",
        dest="requests",
        type=Path,
        metavar="FILE",
        help="the plans, as cudnn_ops.save_requests wrote them, or shapes by hand, in JSON",
    )
    which.add_argument(
        "--common",
        action="store_true",
        help="those of common shapes, which wheels have (cudnn_ops/plans/common.py)",
    )
    bundle.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="the bundle; with --common a folder, in which it is named by the GPU and the driver",
    )
    add_device(bundle)
    bundle.add_argument(
        "--driver",
        metavar="VERSION",
        help='the "CUDA Version" that nvidia-smi shows there (default: the description\'s)',
    )
    bundle.add_argument("--threads", type=int, metavar="N", help="plans built at once")
    bundle.set_defaults(run=_bundle)


def _bundle(args: argparse.Namespace) -> int:
    out = args.out
    if args.common:
        requests = common_requests(args.device)
        out /= file_name(described(args.device, args.driver)[1])
    else:
        requests = load_requests(args.requests, device=args.device)
    report = build_bundle(
        requests,
        args.device,
        out,
        driver=args.driver,
        threads=args.threads,
        progress=sys.stderr.isatty(),
    )
    for request, reason in report.refused.items():
        print(f"refused: {request}: {reason}")
    for request, reason in report.left_out.items():
        print(f"left out: {request}: {reason}")
    if report.plans:
        print(f"{report.plans} plans in {out}, {report.bytes:,} bytes")
    else:
        print(f"no plan could be written: there is no {out}")
    return 0 if report.plans and not report.refused else 1
