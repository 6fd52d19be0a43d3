"""Requests for plans as JSON, for another process or another machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from cudnn_ops import _C
from cudnn_ops.plans.warmup import PlanRequest, plan_requests

_SHORT_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def save_requests(requests: Iterable[PlanRequest], path: str | os.PathLike[str]) -> None:
    """Saves requests as JSON, for :func:`load_requests` and ``python -m cudnn_ops bundle``.

    The file names the version of the keys, so that another version of cudnn_ops refuses them.

    Args:
        requests: the result of :func:`record_shapes` or :func:`plan_requests`.
        path: the file; one that is there is replaced.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import torch, cudnn_ops, tempfile
        >>> requests = cudnn_ops.plan_requests("rms_norm", ((64, 512), torch.bfloat16))
        >>> path = tempfile.mkdtemp() + "/shapes.json"
        >>> cudnn_ops.save_requests(requests, path)
        >>> cudnn_ops.load_requests(path) == requests
        True
    """
    entries = [{"op": request.op, "words": request.words} for request in requests]
    content = {"graphs": _C.versions()["graphs"], "requests": entries}
    Path(path).write_text(json.dumps(content) + "\n")


def load_requests(
    path: str | os.PathLike[str], *, device: str | Path | None = None
) -> list[PlanRequest]:
    """Reads requests that were saved, or shapes that were written by hand.

    The file holds what :func:`save_requests` wrote, or a list, each entry of which is one of

    - the ``words`` of a request, a list of integers;
    - an object with the arguments of :func:`plan_requests`: ``{"op": "sdpa", "q": [[4, 32, 2048,
      128], "bfloat16"], "is_causal": true, "training": false}``. A tensor is a list of its shape,
      its dtype and, where it is not contiguous, its strides; ``"bf16"``, ``"fp16"`` and ``"fp32"``
      are accepted as dtypes too.

    Args:
        path: the file.
        device: the GPU that the plans are for, where entries are shapes, as in
            :func:`plan_requests`.

    Returns:
        The requests, each once, in the order of the file.

    Raises:
        ValueError: the file is no such JSON; an entry is not accepted; the requests are those of
            another version of cudnn_ops.
        OSError: the file cannot be read.

    Example:
        >>> import cudnn_ops, json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "shapes.json"
        >>> _ = path.write_text('[{"op": "rms_norm", "q": [[64, 512], "bf16"]}]')
        >>> [request.op for request in cudnn_ops.load_requests(path)]
        ['norm', 'norm_backward']
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if isinstance(content, Mapping):
        version, here = content.get("graphs"), _C.versions()["graphs"]
        if version != here:
            raise ValueError(
                f"{path} has requests of another version of cudnn_ops (graphs {version}, here "
                f"{here}); record them again"
            )
        content = content.get("requests")
    if not isinstance(content, list):
        raise ValueError(f"{path} is not a list of requests or shapes")
    requests: list[PlanRequest] = []
    for number, entry in enumerate(content):
        try:
            requests += _requests_of(entry, device)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, entry {number}: {error}") from error
    return list(dict.fromkeys(requests))


def _requests_of(entry: Any, device: str | Path | None) -> list[PlanRequest]:
    words = entry.get("words") if isinstance(entry, Mapping) else entry
    if words is None:
        arguments = {name: _argument(value) for name, value in entry.items()}
        if "op" not in arguments:
            raise ValueError('an object must have "op", or "words"')
        return plan_requests(**arguments, device=device)
    # bool is an int to Python, and no word.
    if not isinstance(words, list) or not all(type(word) is int for word in words):
        raise ValueError("a request must be a list of integers, or an object")
    if any(not -(2**63) <= word < 2**63 for word in words):
        raise ValueError("a request's integers must fit in 64 bits")
    request = PlanRequest(tuple(words))
    str(request)  # raises for what is no key of this version
    return [request]


def _argument(value: Any) -> Any:
    """What stands for it in Python: a dtype, a tensor's description, or itself."""
    if isinstance(value, str):
        return _dtype(value) or value
    if isinstance(value, list):
        parts = tuple(_argument(part) for part in value)
        for part in parts:
            if isinstance(part, str):
                raise ValueError(f"{part!r} is not a dtype of PyTorch")
        return parts
    return value


def _dtype(name: str) -> torch.dtype | None:
    found = _SHORT_DTYPES.get(name, getattr(torch, name, None))
    return found if isinstance(found, torch.dtype) else None
