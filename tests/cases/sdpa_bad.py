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


def _every(name: str, change: Callable[[Tensor], Any]) -> dict[str, Callable[[Tensor], Any]]:
    return dict.fromkeys(("query", "key", "value") if name == "all" else (name,), change)


def _transposed_memory(tensor: Tensor) -> Tensor:
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def _strided(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[..., ::2]


MISTAKES: list[Mistake] = [
    # rank
    *(
        Mistake(
            f"{name}-3d",
            ValueError,
            f"{name} must have 4 dimensions",
            change=_every(name, lambda t: t[0]),
        )
        for name in ("query", "key", "value")
    ),
    Mistake("query-5d", ValueError, "query must have 4 dimensions", query=(1, 2, 4, 16, 64)),
    Mistake("query-1d", ValueError, "query must have 4 dimensions", query=(64,)),
    Mistake("query-0d", ValueError, "query must have 4 dimensions", query=()),
    # dtype
    *(
        Mistake(
            f"all-{str(dtype)[6:]}",
            TypeError,
            "query has dtype .* it takes float16 and bfloat16",
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
    Mistake("batch-value", ValueError, "batch size 2 and value 1", value=(1, 4, 16, 64)),
    Mistake(
        "heads-unlike", ValueError, "pass enable_gqa=True", key=(2, 2, 16, 64), value=(2, 2, 16, 64)
    ),
    Mistake("heads-key-value", ValueError, "key has 4 heads and value 2", value=(2, 2, 16, 64)),
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
    Mistake("head-size-value-odd", ValueError, "head size of value is 20", value=(2, 4, 16, 20)),
    *(
        Mistake(
            f"head-size-{d}",
            ValueError,
            f"head size of query is {d}.* pad the last dimension",
            query=(2, 4, 16, d),
            key=(2, 4, 16, d),
            value=(2, 4, 16, d),
        )
        for d in (1, 4, 7, 60, 65, 129)
    ),
    Mistake(
        "head-size-0",
        ValueError,
        "head size of query is 0|last stride",
        query=(2, 4, 16, 0),
        key=(2, 4, 16, 0),
        value=(2, 4, 16, 0),
    ),
    # memory
    *(
        Mistake(
            f"{name}-transposed",
            ValueError,
            f"{name} must have a last stride of 1",
            change=_every(name, _transposed_memory),
        )
        for name in ("query", "key", "value")
    ),
    Mistake("query-strided", ValueError, "last stride of 1", change=_every("query", _strided)),
    Mistake(
        "key-expanded-last",
        ValueError,
        "last stride of 1",
        change=_every("key", lambda t: t[..., :1].expand(-1, -1, -1, 64)),
    ),
    # options
    *(
        Mistake(f"scale-{value}", ValueError, "scale must be a finite", kwargs={"scale": value})
        for value in (float("nan"), float("inf"), float("-inf"), 1e300)
    ),
    *(
        Mistake(
            f"dropout-{p}", NotImplementedError, "dropout_p must be 0.0", kwargs={"dropout_p": p}
        )
        for p in (0.1, 1.0, -1.0)
    ),
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
    Mistake("unknown-argument", RuntimeError, "window", kwargs={"window": 3}),
]
