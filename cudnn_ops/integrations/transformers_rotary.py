"""Rotary position embedding of transformers' models, one kernel for queries and one for keys.

Their attention calls ``apply_rotary_pos_emb``, a function of the file that it is in. A module whose
``forward`` names it gets one of its own: the same code, with another function by that name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_ops.ops.rotary import rotary_embedding

_NAME = "apply_rotary_pos_emb"
Apply = Callable[..., tuple[Tensor, Tensor]]


def fuse_rotary_(model: nn.Module) -> list[str]:
    """Makes a model's attention turn its queries and keys by :func:`cudnn_ops.rotary_embedding`.

    Only where the function that it calls now computes the same on random numbers. Calls that ours
    does not take, such as another ``unsqueeze_dim``, go to that one. Other models, of the same
    class too, stay as they are; to do it again changes nothing.

    Args:
        model: any module; of its parts those are changed whose class's ``forward`` calls
            ``apply_rotary_pos_emb``.

    Returns:
        The names of those parts.
    """
    forwards: dict[FunctionType, FunctionType | None] = {}
    fused = []
    for name, part in model.named_modules():
        forward = type(part).forward
        if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
            continue
        if forward not in forwards:
            forwards[forward] = _with_ours(forward)
        ours = forwards[forward]
        if ours is not None:
            part.forward = MethodType(ours, part)
            fused.append(name)
    return fused


def _with_ours(forward: FunctionType) -> FunctionType | None:
    """The same code, where ``apply_rotary_pos_emb`` is ours; None where it computes another."""
    apply = forward.__globals__.get(_NAME)
    if apply is None or not _computes_the_same(apply):
        return None
    names: dict[str, Any] = {**forward.__globals__, _NAME: _fused(apply)}
    ours = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _fused(apply: Apply) -> Apply:
    @functools.wraps(apply)
    def fused(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if args or kwargs or not _takes(q, cos, sin) or not _takes(k, cos, sin):
            return apply(q, k, cos, sin, *args, **kwargs)
        return rotary_embedding(q, cos, sin), rotary_embedding(k, cos, sin)

    return fused


def _takes(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return (
        x.dim() == 4
        and cos.shape == sin.shape
        and cos.dim() == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:] == x.shape[2:]
        # Of float32 angles and less the products are float32 there.
        and cos.dtype == x.dtype
        and not cos.requires_grad
    )


def _computes_the_same(apply: Apply) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, cos, sin = draw(2, 3, 5, 8), draw(2, 1, 5, 8), draw(2, 5, 8), draw(2, 5, 8)
    try:
        found = apply(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments
        return False
    expected = (rotary_embedding(q, cos, sin), rotary_embedding(k, cos, sin))
    return all(
        isinstance(mine, Tensor) and mine.shape == other.shape and torch.allclose(mine, other)
        for mine, other in zip(found, expected, strict=True)
    )
