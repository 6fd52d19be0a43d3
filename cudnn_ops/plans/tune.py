"""Measuring cuDNN's engines for given shapes: ``python -m cudnn_ops tune``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_ops import _C, support
from cudnn_ops.plans.policy import using_plan_policy
from cudnn_ops.plans.warmup import PlanRequest

#: Batch, query heads, key heads, query length, key length, head size, causal: what the package's
#: tables are measured with. Training, prompts, decoding, cross attention, large and small heads.
STANDARD_SHAPES = (
    (4, 32, 8, 2048, 2048, 128, True),
    (2, 32, 8, 8192, 8192, 128, True),
    (8, 16, 16, 1024, 1024, 64, False),
    (8, 16, 16, 1024, 1024, 64, True),
    (4, 32, 8, 300, 300, 128, True),
    (32, 12, 12, 128, 128, 64, False),
    (16, 12, 12, 512, 512, 64, True),
    (2, 16, 16, 4096, 77, 64, False),
    (4, 16, 16, 1500, 1500, 80, False),
    (4, 16, 4, 2048, 2048, 96, True),
    (2, 16, 8, 2048, 2048, 256, True),
    (8, 32, 32, 256, 256, 32, False),
    (64, 32, 8, 1, 2048, 128, False),
    (8, 64, 1, 16, 4096, 128, False),
)


@dataclass(frozen=True)
class TunedPlan:
    """The engines that cuDNN offers for one plan, and the time of one call with each."""

    request: PlanRequest
    engine_ms: dict[str, float]
    """GPU time in milliseconds, the heuristics' first choice first; infinite if it fails."""

    @property
    def first(self) -> str:
        """The engine that the heuristics name first."""
        return next(iter(self.engine_ms))

    @property
    def fastest(self) -> str:
        return min(self.engine_ms, key=lambda engine: self.engine_ms[engine])

    @property
    def gain(self) -> float:
        """The share of the first engine's time that the fastest one saves."""
        return 1 - self.engine_ms[self.fastest] / self.engine_ms[self.first]

    def __str__(self) -> str:
        lines = [str(self.request)]
        for engine, ms in sorted(self.engine_ms.items(), key=lambda item: item[1]):
            mark = "  (cuDNN's choice)" if engine == self.first else ""
            time = f"{ms:.4f} ms" if math.isfinite(ms) else "does not run"
            lines.append(f"  {engine:<24} {time}{mark}")
        return "\n".join(lines)


def tune_sdpa(
    q: support.TensorSpec,
    k: support.TensorSpec | None = None,
    v: support.TensorSpec | None = None,
    *,
    is_causal: bool = False,
    training: bool = True,
) -> list[TunedPlan]:
    """Measures every engine for these shapes, with random values, on the current GPU.

    Exact plans of the forward and, with ``training``, of the backward. A polymorphic plan keeps
    cuDNN's own choice, for the best engine at one length may be the worst at another. Clears the
    plan cache first, and stores the fastest plans.

    Args:
        q: the query, as in :func:`cudnn_ops.support.explain`.
        k: the key; None stands for one like the query.
        v: the value; None stands for one like the key.
        is_causal: as in :func:`cudnn_ops.scaled_dot_product_attention`.
        training: whether to measure the backward too.

    Returns:
        One result for each plan.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("tuning needs a GPU, and torch sees none")
    tensors = [
        random_like(tensor, "cuda").requires_grad_(training)
        for tensor in support.meta_tensors(q, k, v)
    ]
    before = _C.autotune()
    _C.take_measurements()
    _C.set_autotune(2)
    try:
        _C.cache_clear()
        with using_plan_policy("exact"):
            out = torch.ops.cudnn_ops.sdpa(*tensors, is_causal=is_causal, enable_gqa=True)
            if training:
                torch.autograd.grad(out, tensors, torch.randn_like(out))
    finally:
        _C.set_autotune(before)
    return [
        TunedPlan(PlanRequest(tuple(words)), dict(engines))
        for words, engines in _C.take_measurements()
    ]


def tune_standard_shapes() -> list[TunedPlan]:
    """:func:`tune_sdpa` for each of :data:`STANDARD_SHAPES`, bf16 in [B, S, H, D] memory."""
    tuned = []
    for batch, heads, heads_kv, length, length_kv, size, is_causal in STANDARD_SHAPES:

        def tensor(heads: int, length: int, batch: int = batch, size: int = size) -> Tensor:
            memory = (batch, length, heads, size)
            return torch.empty(memory, dtype=torch.bfloat16, device="meta").transpose(1, 2)

        keys = tensor(heads_kv, length_kv)
        tuned += tune_sdpa(tensor(heads, length), keys, keys, is_causal=is_causal)
    return tuned


def random_like(tensor: Tensor, device: str) -> Tensor:
    """Random values in memory of the same sizes and strides."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.randn(extent, dtype=tensor.dtype, device=device)
    return memory.as_strided(tensor.shape, tensor.stride())
