"""Attention: the mistakes that people make, and what they must be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
GOOD: Shape = (2, 4, 16, 64)


@dataclass(frozen=True)
class Mistake:
    """A call that must raise ``error`` with a message that matches ``match``.

    ``change`` turns the tensor of that name into the wrong one.
    """

    name: str
    error: type[Exception]
    match: str
    query: Shape = GOOD
    key: Shape = GOOD
    value: Shape = GOOD
    change: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    """Options that are tensors, by shape and dtype."""
    only: tuple[str, ...] = ()
    """Devices on which this is a mistake; empty: on all."""

    def __str__(self) -> str:
        return self.name

    def arguments(self, device: str) -> list[Any]:
        shapes = {"query": self.query, "key": self.key, "value": self.value}
        made = {
            name: torch.ones(shape, dtype=torch.bfloat16, device=device)
            for name, shape in shapes.items()
        }
        return [self.change.get(name, lambda t: t)(tensor) for name, tensor in made.items()]

    def options(self, device: str) -> dict[str, Any]:
        made = {
            name: torch.ones(shape, dtype=getattr(torch, dtype), device=device)
            for name, (shape, dtype) in self.tensors.items()
        }
        return {**self.kwargs, **made}


def _some(name: str, *shape: int, dtype: str = "float32") -> dict[str, tuple[Shape, str]]:
    return {name: (shape, dtype)}


def _masks(*shapes: Shape) -> list[tuple[Shape, dict[str, tuple[Shape, str]]]]:
    return [(shape, _some("attn_mask", *shape, dtype="bool")) for shape in shapes]


def _every(name: str, change: Callable[[Tensor], Any]) -> dict[str, Callable[[Tensor], Any]]:
    return dict.fromkeys(("query", "key", "value") if name == "all" else (name,), change)


MISTAKES: list[Mistake] = [
    # rank
    *(
        Mistake(
            f"{name}-1d",
            ValueError,
            f"{name} must have at least 2 dimensions",
            change=_every(name, lambda t: t[0, 0, 0]),
        )
        for name in ("query", "key", "value")
    ),
    Mistake("query-0d", ValueError, "query must have at least 2 dimensions", query=()),
    # dtype
    *(
        Mistake(
            f"all-{str(dtype)[6:]}",
            TypeError,
            "query has dtype .* must be float16 or bfloat16",
            change=_every("all", partial(Tensor.to, dtype=dtype)),
        )
        for dtype in (torch.int32, torch.int8, torch.bool, torch.complex64)
    ),
    Mistake(
        "all-float32-on-a-gpu",
        TypeError,
        "use torch.autocast",
        change=_every("all", Tensor.float),
        only=("cuda",),
    ),
    Mistake(
        "all-float64-on-a-gpu",
        TypeError,
        "use torch.autocast",
        change=_every("all", Tensor.double),
        only=("cuda",),
    ),
    *(
        Mistake(
            f"{name}-half",
            TypeError,
            f"{name} .*; cast them to one dtype",
            change=_every(name, Tensor.half),
        )
        for name in ("key", "value")
    ),
    Mistake(
        "query-half",
        TypeError,
        "query has dtype .*; cast them",
        change=_every("query", Tensor.half),
    ),
    Mistake(
        "key-float32",
        TypeError,
        "key .*; cast them to one dtype",
        change=_every("key", Tensor.float),
    ),
    # batch, heads, lengths, head sizes
    Mistake("batch-key", ValueError, "batch size 2 and key 3", key=(3, 4, 16, 64)),
    Mistake("batch-value", ValueError, "batch size 2 and value 3", value=(3, 4, 16, 64)),
    Mistake(
        "batch-key-value",
        ValueError,
        "key has batch size 2 and value 3",
        query=(1, 4, 16, 64),
        value=(3, 4, 16, 64),
    ),
    Mistake(
        "batch-5d",
        ValueError,
        "batch size 3 and key 2",
        query=(3, 2, 4, 16, 64),
        key=(2, 2, 4, 16, 64),
    ),
    Mistake(
        "heads-unlike", ValueError, "pass enable_gqa=True", key=(2, 2, 16, 64), value=(2, 2, 16, 64)
    ),
    Mistake(
        "heads-3d", ValueError, "query has 4 heads and key 3", query=(4, 16, 64), key=(3, 16, 64)
    ),
    Mistake("heads-key-value", ValueError, "4 heads and value 2", value=(2, 2, 16, 64)),
    Mistake(
        "heads-key-value-of-one-query-head",
        ValueError,
        "key has 4 heads and value 2",
        query=(2, 1, 16, 64),
        value=(2, 2, 16, 64),
    ),
    # [batch, length, heads, head size]
    *(
        Mistake(
            f"heads-and-length-swapped-{length}x{length_kv}{'-gqa' * grouped}",
            ValueError,
            rf"{length} heads and key {length_kv}.*pass query.transpose\(1, 2\)",
            query=(2, length, 8, 64),
            key=(2, length_kv, 8 >> grouped, 64),
            value=(2, length_kv, 8 >> grouped, 64),
            kwargs={"enable_gqa": True} if grouped else {},
        )
        for length, length_kv, grouped in ((17, 40, 0), (80, 40, 0), (17, 40, 1))
    ),
    Mistake(
        "heads-not-a-multiple",
        ValueError,
        "must be a multiple",
        key=(2, 3, 16, 64),
        value=(2, 3, 16, 64),
        kwargs={"enable_gqa": True},
    ),
    Mistake(
        "heads-more-keys",
        ValueError,
        "must be a multiple",
        key=(2, 8, 16, 64),
        value=(2, 8, 16, 64),
        kwargs={"enable_gqa": True},
    ),
    Mistake(
        "heads-none",
        ValueError,
        "must be a multiple",
        key=(2, 0, 16, 64),
        value=(2, 0, 16, 64),
        kwargs={"enable_gqa": True},
    ),
    Mistake("length-key-value", ValueError, "key has length 16 and value 17", value=(2, 4, 17, 64)),
    Mistake("head-size-key", ValueError, "query has head size 64 and key 32", key=(2, 4, 16, 32)),
    # options
    *(
        Mistake(f"scale-{value}", ValueError, "scale must be a finite", kwargs={"scale": value})
        for value in (float("nan"), float("inf"), float("-inf"), 1e300)
    ),
    *(
        Mistake(f"dropout-{p}", ValueError, "dropout_p must be at least 0", kwargs={"dropout_p": p})
        for p in (1.0, -0.1, 2.0, float("nan"))
    ),
    *(
        Mistake(
            f"window-{window}", ValueError, "window_size must be", kwargs={"window_size": window}
        )
        for window in ((-2, 0), (0, -5))
    ),
    *(
        Mistake(f"softcap-{value}", ValueError, "softcap must be", kwargs={"softcap": value})
        for value in (-1.0, float("nan"), float("inf"))
    ),
    # tensors among the options: made on the device of the call
    *(
        Mistake(f"mask-{'x'.join(map(str, shape))}", ValueError, "does not broadcast", tensors=mask)
        for shape, mask in _masks((2, 4, 16, 15), (3, 1, 16, 16), (2, 2, 16, 16), (17, 16))
    ),
    Mistake(
        "mask-5d", ValueError, "does not broadcast", tensors=_some("attn_mask", 1, 2, 4, 16, 16)
    ),
    Mistake(
        "mask-of-keys",
        ValueError,
        r"is given as attn_mask\[:, None, None, :\]",
        tensors=_some("attn_mask", 2, 16, dtype="bool"),
    ),
    Mistake(
        "mask-6d",
        ValueError,
        "does not broadcast",
        query=(1, *GOOD),
        tensors=_some("attn_mask", 1, 1, *GOOD[:2], 16, 16),
    ),
    Mistake(
        "mask-int",
        TypeError,
        "attn_mask has dtype",
        tensors=_some("attn_mask", 16, 16, dtype="int32"),
    ),
    Mistake("slopes-2d", ValueError, "alibi_slopes must hold", tensors=_some("alibi_slopes", 2, 4)),
    Mistake("slopes-short", ValueError, "alibi_slopes must hold", tensors=_some("alibi_slopes", 3)),
    Mistake("sinks-long", ValueError, "sinks must hold", tensors=_some("sinks", 5)),
    Mistake("sinks-int", ValueError, "sinks must hold", tensors=_some("sinks", 4, dtype="int64")),
    *(
        Mistake(f"{name}-{what}", ValueError, f"{name} must be an int32", tensors={name: spec})
        for name in ("seq_lens_q", "seq_lens_kv")
        for what, spec in (
            ("float", ((2,), "float32")),
            ("short", ((1,), "int32")),
            ("2d", ((2, 1), "int32")),
        )
    ),
    Mistake("rng-float", ValueError, "rng_state must be", tensors=_some("rng_state", 2)),
    Mistake("rng-3", ValueError, "rng_state must be", tensors=_some("rng_state", 3, dtype="int64")),
    # what is no tensor, or no such argument: torch's own words
    *(
        Mistake(
            f"{name}-none",
            TypeError,
            f"{name} must be a tensor, got None",
            change=_every(name, lambda t: None),
        )
        for name in ("query", "key", "value")
    ),
    Mistake("query-list", RuntimeError, "query", change=_every("query", lambda t: [1.0])),
    Mistake("scale-text", RuntimeError, "scale", kwargs={"scale": "big"}),
    Mistake("causal-text", RuntimeError, "is_causal", kwargs={"is_causal": "yes"}),
    Mistake("unknown-argument", RuntimeError, "windows", kwargs={"windows": 3}),
]
