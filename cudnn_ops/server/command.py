"""``python -m cudnn_ops serve``: a folder of transformers, served over HTTP."""

from __future__ import annotations

import argparse
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cudnn_ops.server.async_engine import AsyncEngine
from cudnn_ops.serving import Engine, PromptLookup
from cudnn_ops.serving.memory import whole

if TYPE_CHECKING:
    from cudnn_ops.integrations.transformers_serving import ServedModel

#: Of what the weights leave of a GPU's memory, what the cache gets; the rest is for activations.
_SHARE = 0.85
_CPU_BYTES = 1 << 30
#: The cache is not larger than so many of the largest batches of the longest requests.
_BATCHES = 4
#: Seconds: Python's own, 5 ms, is as long as a step, and the engine's thread would wait that long
#: for the event loop's.
_SWITCH_INTERVAL = 2e-4
_DTYPES = {"auto": None} | {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")
}
_CACHE_DTYPES = {"auto": None, "float8_e4m3fn": torch.float8_e4m3fn}


def add_serve(commands: Any) -> None:
    """Adds the command ``serve`` to those of ``python -m cudnn_ops``."""
    serve = commands.add_parser(
        "serve",
        help="an HTTP server with OpenAI's routes",
        description="Serves a Llama, Qwen or Mistral folder of Hugging Face transformers with "
        "OpenAI's completions and chat routes, and a page to talk to it. SIGTERM ends it: new "
        "requests get status 503, and those that run get --grace seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    serve.add_argument("folder", type=Path, help="config.json, safetensors and a tokenizer")
    serve.add_argument("--name", help="what clients call the model; None: the folder's name")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen; 0.0.0.0: everywhere")
    serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    serve.add_argument(
        "--dtype", choices=_DTYPES, default="auto", help="auto: the folder's; float32 on a CPU"
    )
    for name, default, meaning in (
        ("max-batch", 32, "requests that run at once"),
        ("max-waiting", 256, "requests that wait beside them; more get status 429"),
        ("chunk", 1024, "tokens of prompts that a step computes"),
        ("max-length", None, "tokens of a request, prompt and output; None: what the model has"),
        ("page-size", 16, "tokens of a page of the cache"),
        ("draft-tokens", 0, "draft tokens of a request in a step, by prompt lookup; 0: none"),
        ("max-body-bytes", 4 << 20, "the largest body of a request; larger ones get status 413"),
    ):
        serve.add_argument(f"--{name}", type=int, default=default, help=meaning)
    serve.add_argument(
        "--cache-gib",
        type=float,
        help=f"memory of the cache; None: {_SHARE:.0%}".replace("%", "%%")
        + " of what the weights leave of a GPU, 1 on a CPU",
    )
    serve.add_argument(
        "--cache-dtype",
        choices=_CACHE_DTYPES,
        default="auto",
        help="auto: the model's; float8_e4m3fn: half the memory of bfloat16",
    )
    serve.add_argument(
        "--grace", type=float, default=30.0, help="seconds that requests get to finish at the end"
    )
    serve.add_argument(
        "--api-key", help="what clients must send as bearer; None: what CUDNN_OPS_API_KEY says"
    )
    serve.add_argument("--chat-template", type=Path, help="a Jinja file; None: the folder's own")
    serve.set_defaults(run=_serve)


def pages_of(
    model: ServedModel,
    max_batch: int,
    page_size: int,
    gib: float | None,
    dtype: torch.dtype | None = None,
) -> int:
    """How many pages the cache of a model gets.

    Args:
        model: on its device.
        max_batch: the largest number of requests that run at once.
        page_size: tokens in a page.
        gib: the cache's memory; None stands for what suits the device.
        dtype: the cache's; None stands for the model's.

    Raises:
        ValueError: there is no room for a page.
    """
    device = next(model.model.parameters()).device
    if gib is not None:
        room = int(gib * (1 << 30))
    elif device.type == "cuda":
        room = int(_SHARE * torch.cuda.mem_get_info(device)[0])
    else:
        room = _CPU_BYTES
    each = model.page_bytes(page_size, dtype)
    pages = room // each
    if pages < 1:
        raise ValueError(
            f"the cache has room for {room} bytes, and a page takes {each}: "
            "more with --cache-gib, or a smaller --page-size"
        )
    return min(pages, _BATCHES * max_batch * -(-model.max_length // page_size))


def _serve(args: argparse.Namespace) -> int:
    if not math.isfinite(args.grace) or args.grace < 0:
        raise ValueError(f"--grace must be at least 0 and finite, got {args.grace}")
    for name in ("max_batch", "chunk", "page_size", "max_body_bytes"):
        whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    whole("--max-waiting", args.max_waiting, 0)
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must be 0 to 65535, got {args.port}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none")
    try:
        # What is missing is told before transformers is imported, which takes long.
        from cudnn_ops.server.app import create_app
        from cudnn_ops.server.running import bind, serve, url_of

        adapter = import_module("cudnn_ops.integrations.transformers_serving")
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    key = args.api_key or os.environ.get("CUDNN_OPS_API_KEY") or None
    bound = bind(args.host, args.port)
    with bound:
        template = args.chat_template
        tokenizer = adapter.load_tokenizer(
            args.folder, None if template is None else template.read_text(encoding="utf-8")
        )
        device = args.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = adapter.load_model(
            args.folder, device=device, dtype=_DTYPES[args.dtype], max_length=args.max_length
        )
        cache_dtype = _CACHE_DTYPES[args.cache_dtype]
        pages = pages_of(model, args.max_batch, args.page_size, args.cache_gib, cache_dtype)
        engine = Engine(
            model,
            model.cache(pages, args.page_size, cache_dtype),
            max_batch=args.max_batch,
            chunk=args.chunk,
            max_length=model.max_length,
            decode=tokenizer.decode,
            speculation=PromptLookup(args.draft_tokens) if args.draft_tokens else None,
        )
        engine.warm_up()
        serving = AsyncEngine(
            engine,
            vocabulary=model.vocabulary,
            decode=tokenizer.decode,
            max_waiting=args.max_waiting,
        )
        name = args.name or args.folder.resolve().name
        app = create_app(serving, tokenizer, name, api_key=key, max_body_bytes=args.max_body_bytes)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        message = (
            f"{name} at {url_of(bound)}: {engine.max_batch} requests at once, of "
            f"{engine.max_length} tokens, in {pages} pages of {args.page_size}"
        )
        serve(app, serving, bound, grace=args.grace, message=message)
    return 0
