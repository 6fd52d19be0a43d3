"""Rotary embedding in models of transformers, with one kernel.

Its attention calls a global function, ``apply_rotary_pos_emb``, of its module. A part of a model is
changed by giving it a ``forward`` of its own: the same code, with another function by that name.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cudnn_ops.ops.rotary import rotary_embedding_qk

#: The second turns neighbours against each other instead of halves, and returns halves.
_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
Apply = Callable[..., tuple[Tensor, Tensor]]
Columns = Literal["numbers", "pairs", "pairs twice"]


def fuse_rotary_(model: nn.Module) -> list[str]:
    """Makes a model's attention turn queries and keys by :func:`cudnn_ops.rotary_embedding_qk`.

    That is one kernel for both. A function is replaced only if it computes the same on random
    inputs: over whole heads, over their first part (Phi-3, GPT-NeoX), on neighbouring elements
    (Cohere, GLM; DeepSeek-V3), by an angle for each pair (gpt-oss), or with float32 angles
    (OLMo 2 and 3). Unsupported calls, such as those with angles of another shape, use the
    original function, with a warning. Other models, even of the same class, are not changed; a
    second call changes nothing.

    Args:
        model: any module. Changed are the submodules whose class's ``forward`` calls
            ``apply_rotary_pos_emb`` or ``apply_rotary_pos_emb_interleave``, if all of these calls
            are understood.

    Returns:
        The names of the changed submodules.
    """
    forwards: dict[FunctionType, FunctionType | None] = {}
    fused = []
    for name, part in model.named_modules():
        forward = type(part).forward
        if not isinstance(forward, FunctionType) or not _called(forward):
            continue
        if forward not in forwards:
            forwards[forward] = _with_ours(forward)
        ours = forwards[forward]
        if ours is not None:
            part.forward = MethodType(ours, part)
            fused.append(name)
    return fused


def _called(forward: FunctionType) -> list[str]:
    return [name for name in _NAMES if name in forward.__code__.co_names]


def _with_ours(forward: FunctionType) -> FunctionType | None:
    """The same code with our functions; None if one of them computes something else."""
    names: dict[str, Any] = dict(forward.__globals__)
    for name in _called(forward):
        apply = names.get(name)
        turn = None if apply is None else _understand(apply)
        if turn is None:
            return None
        names[name] = _fused(turn)
    ours = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


@dataclass(frozen=True)
class _Turn:
    """The variant of rotary embedding that a function of transformers computes."""

    apply: Apply
    interleaved: bool = False
    """Whether neighbouring elements are rotated."""
    to_halves: bool = False
    """Whether these are the halves of the result."""
    columns: Columns = "numbers"
    """What angles there are: for each number, or for each pair, of these perhaps twice."""
    of_parts: bool = False
    """Whether elements of a head beyond the number of angles are left unchanged."""
    by_wide: bool = False
    """Whether float32 angles make float32 products and a result in the input's dtype."""

    def size(self, cos: Tensor) -> int:
        """How much of a head turns."""
        return cos.shape[-1] * (2 if self.columns == "pairs" else 1)

    def supports(self, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
        """Whether the operator supports ``x``, [B, H, S, D], and angles, [B or 1, S, columns]."""
        return (
            x.dim() == 4
            and cos.shape == sin.shape
            and cos.dim() == 3
            and cos.shape[0] in (1, x.shape[0])
            and cos.shape[1] == x.shape[2]
            and (self.size(cos) == x.shape[3] or (self.of_parts and self.size(cos) < x.shape[3]))
            and (cos.dtype == x.dtype or (self.by_wide and cos.dtype == torch.float32))
            and not cos.requires_grad
        )

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        size = self.size(cos)
        if self.columns == "pairs twice":
            cos, sin = (angles[..., : size // 2] for angles in (cos, sin))
        if self.to_halves:
            q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
        is_interleaved = self.interleaved and not self.to_halves
        return rotary_embedding_qk(q, k, cos, sin, interleaved=is_interleaved, rotary_dim=size)


def _fused(turn: _Turn) -> Apply:
    extra = list(inspect.signature(turn.apply).parameters.values())[4:]
    defaults = {parameter.name: parameter.default for parameter in extra}

    @functools.wraps(turn.apply)
    def fused(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        dim = given.pop("unsqueeze_dim", 1)
        is_known = all(name in defaults and given[name] is defaults[name] for name in given)
        angles = (cos.unsqueeze(0), sin.unsqueeze(0)) if dim == 0 else (cos, sin)
        # [B, S, H, D] where the heads come third.
        tensors = [x.transpose(1, 2) if dim == 2 else x for x in (q, k)]
        if (
            is_known
            and dim in (0, 1, 2)
            and all(turn.supports(x, *angles) for x in tensors)
            and _are_alike(*tensors)
        ):
            q, k = turn(tensors[0], tensors[1], *angles)
            return (q.transpose(1, 2), k.transpose(1, 2)) if dim == 2 else (q, k)
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"cudnn_ops.rotary_embedding does not support this call of {turn.apply.__name__}, "
                f"with q {tuple(q.shape)} and k {tuple(k.shape)} of {q.dtype}, cos and sin "
                f"{tuple(cos.shape)} of {cos.dtype}, unsqueeze_dim={dim}; it runs as it is in "
                "transformers",
                stacklevel=2,
            )
        return turn.apply(q, k, cos, sin, *args, **kwargs)

    return fused


def _are_alike(q: Tensor, k: Tensor) -> bool:
    """In all but the number of heads."""
    return (q.shape[0], *q.shape[2:], q.dtype) == (k.shape[0], *k.shape[2:], k.dtype)


#: All but the last two fields of the variants that there are.
_VARIANTS: tuple[tuple[bool, bool, Columns], ...] = (
    (False, False, "numbers"),
    (False, False, "pairs"),
    (True, False, "numbers"),
    (True, False, "pairs twice"),
    (True, True, "pairs twice"),
)


def _understand(apply: Apply) -> _Turn | None:
    for variant in _VARIANTS:
        turn = _Turn(apply, *variant, of_parts=True, by_wide=True)
        if _computes(turn, size=8):
            of_parts = _computes(turn, size=4)
            by_wide = _computes(turn, size=8, dtype=torch.bfloat16)
            return _Turn(apply, *variant, of_parts, by_wide)
    return None


def _computes(turn: _Turn, size: int, dtype: torch.dtype = torch.float64) -> bool:
    """Whether theirs gives what ours does, where ``size`` numbers turn by float32 or wider."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = draw(2, 3, 5, 8).to(dtype), draw(2, 1, 5, 8).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    columns = size // 2 if turn.columns == "pairs" else size
    cos, sin = draw(2, 5, columns).to(wide), draw(2, 5, columns).to(wide)
    try:
        found = turn.apply(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):  # other arguments
        return False
    ours = turn(q, k, cos, sin)
    return len(found) == 2 and all(
        isinstance(theirs, Tensor)
        and theirs.shape == mine.shape
        and theirs.dtype == dtype
        and torch.allclose(theirs, mine, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
        for theirs, mine in zip(found, ours, strict=True)
    )
