"""Dense attention at training shapes: GPU time of forward and backward, and peak memory.

bf16 in [B, S, H, D] memory. The forward is a training forward: it keeps what the backward needs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.harness import Rows, gpu_ms, main, peak_bytes

# A share of the reference's norm: bf16 operands land between 1e-3 and 1e-2.
TOLERANCE = 2e-2
# In forwards: the backward has five matrix products where the forward has two.
WORK = {"fwd": 1.0, "bwd": 2.5}


class Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    causal: bool

    def __str__(self) -> str:
        return f"{','.join(map(str, self[:5]))} {'causal' if self.causal else 'full'}"

    @property
    def group(self) -> int:
        """How many query heads share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def forward_flops(self) -> float:
        """Two matrix products, half of them if causal."""
        flops = 4.0 * self.batch * self.heads * self.length**2 * self.dim
        return flops / 2 if self.causal else flops


SHAPES = (
    Shape(4, 32, 8, 2048, 128, causal=True),
    Shape(2, 32, 8, 8192, 128, causal=True),
    Shape(1, 32, 8, 16384, 128, causal=True),
    Shape(8, 16, 16, 1024, 64, causal=False),
)


def run(rows: Rows, rounds: int) -> None:
    attentions = peers.sdpa("cudnn_ops", "torch_cudnn", "torch_flash", "flash_attn_4")
    for shape in SHAPES:
        measure(shape, attentions, rows, rounds)


def measure(shape: Shape, attentions: dict[str, peers.Attention], rows: Rows, rounds: int) -> None:
    """Check every attention at the shape, then add its rows."""
    query, key, value, grad_out = tensors(shape, "cuda")
    inputs = (query, key, value)
    expected = reference(shape, query, key, value, grad_out)
    forward: dict[str, Callable[[], Tensor]] = {}
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name, attention in attentions.items():
        forward[name] = partial(
            attention, *inputs, is_causal=shape.causal, enable_gqa=shape.group > 1
        )
        with peers.backend(name):
            out = forward[name]()
        backward[name] = partial(torch.autograd.grad, out, inputs, grad_out, retain_graph=True)
        verify(f"{name} at {shape}", shape, (out, *backward[name]()), expected)

    for which, functions in (("fwd", forward), ("bwd", backward)):
        for name, ms in gpu_ms(functions, rounds=rounds, around=peers.backend).items():
            rows.add(f"{shape} {which}", name, "gpu_ms", ms)
            tflops = WORK[which] * shape.forward_flops / ms / 1e9
            rows.add(f"{shape} {which}", name, "tflops", tflops)
    for name in ("cudnn_ops", "torch_cudnn"):
        step = partial(forward_backward, forward[name], inputs, grad_out)
        with peers.backend(name):
            rows.add(f"{shape} fwd + bwd", name, "peak_mib", peak_bytes(step) / 2**20)


def forward_backward(
    forward: Callable[[], Tensor], inputs: Sequence[Tensor], grad_out: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(forward(), inputs, grad_out)


def tensors(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output's gradient: [B, H, S, D] views of [B, S, H, D] memory."""
    torch.manual_seed(0)

    def draw(heads: int) -> Tensor:
        sizes = (shape.batch, shape.length, heads, shape.dim)
        return torch.randn(sizes, dtype=torch.bfloat16, device=device).transpose(1, 2)

    query, key, value = (draw(n).requires_grad_() for n in (shape.heads, *[shape.kv_heads] * 2))
    return query, key, value, draw(shape.heads)


def checked(shape: Shape, tensor: Tensor) -> Tensor:
    """What is verified: the last batch entry's last key head, or the query heads that share it."""
    heads = tensor.size(1) // shape.kv_heads
    return tensor.detach()[-1, -heads:].float()


def reference(
    shape: Shape, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor
) -> tuple[Tensor, ...]:
    """The checked part of output, dQ, dK and dV, computed in float32."""
    query, key, value = (checked(shape, t).requires_grad_() for t in (query, key, value))
    scores = (query / math.sqrt(shape.dim)) @ key.mT
    if shape.causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    out = scores.softmax(-1) @ value
    return out.detach(), *torch.autograd.grad(out, (query, key, value), checked(shape, grad_out))


def verify(what: str, shape: Shape, results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise unless the checked part of output, dQ, dK and dV is as expected."""
    for name, result, wanted in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
        error = float((checked(shape, result) - wanted).norm() / wanted.norm())
        # Written so that NaN fails.
        if not error <= TOLERANCE:
            raise RuntimeError(f"{what}: {name} is {error:.2g} of its norm off, over {TOLERANCE}")


if __name__ == "__main__":
    main("sdpa", run)
