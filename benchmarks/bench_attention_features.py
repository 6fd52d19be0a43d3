"""Attention's features: GPU time beside plain causal attention, and without cudnn_ops.

bf16 in [B, S, H, D] memory; a training forward. Peers that take no grouped heads get keys and
values that are expanded outside of the timed part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import cudnn_ops  # noqa: F401  (registers the operators)
from benchmarks import peers
from benchmarks.bench_sdpa import Shape, tensors
from benchmarks.harness import Rows, gpu_ms, main

SHORT = Shape(4, 32, 8, 2048, 128, causal=True)
LONG = Shape(1, 32, 8, 16384, 128, causal=True)
# Of two results, as a share of the first one's norm.
TOLERANCE = 3e-2


@dataclass(frozen=True)
class Feature:
    """One feature at one shape: who computes it, and what is differentiated."""

    name: str
    calls: dict[str, Callable[[], Tensor]]
    leaves: dict[str, Sequence[Tensor]]
    grad_out: Tensor
    comparable: bool = True
    """Whether all results are the same numbers; dropout's are not."""


def run(rows: Rows, rounds: int) -> None:
    for shape in (SHORT, LONG):
        for feature in features(shape):
            measure(feature, shape, rows, rounds)


def measure(feature: Feature, shape: Shape, rows: Rows, rounds: int) -> None:
    backward: dict[str, Callable[[], Any]] = {}
    results: dict[str, Tensor] = {}
    for name, call in feature.calls.items():
        with peers.backend(name):
            out = results[name] = call()
        grad_out = feature.grad_out.reshape(out.shape)
        backward[name] = partial(
            torch.autograd.grad, out, feature.leaves[name], grad_out, retain_graph=True
        )
    ours = results["cudnn_ops"].detach().float().flatten()
    for name, result in results.items():
        error = float((result.detach().float().flatten() - ours).norm() / ours.norm())
        if feature.comparable and not error <= TOLERANCE:  # written so that NaN fails
            raise RuntimeError(f"{feature.name}: {name} differs by {error:.2g} of the norm")
    at = ",".join(map(str, shape[:5]))
    for which, functions in (("fwd", feature.calls), ("bwd", backward)):
        for name, ms in gpu_ms(functions, rounds=rounds, around=peers.backend).items():
            rows.add(f"{at} {feature.name} {which}", name, "gpu_ms", ms)


def features(shape: Shape) -> Iterator[Feature]:
    q, k, v, grad_out = tensors(shape, "cuda")
    inputs = (q, k, v)
    wide = [q, *(t.detach().repeat_interleave(4, 1).requires_grad_() for t in (k, v))]
    length, device = shape.length, q.device.type

    def ours(**options: Any) -> Callable[[], Tensor]:
        return partial(torch.ops.cudnn_ops.sdpa, *inputs, enable_gqa=True, **options)

    def torchs(tensors: Sequence[Tensor], **options: Any) -> Callable[[], Tensor]:
        options["enable_gqa"] = tensors is inputs
        return lambda: scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], **options)

    def flex(score: Any = None, visible: Any = None) -> Callable[[], Tensor]:
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        blocks = None
        if visible is not None:
            blocks = create_block_mask(visible, None, None, length, length, device=device)
        return partial(compiled, *inputs, score_mod=score, block_mask=blocks, enable_gqa=True)

    def feature(name: str, comparable: bool = True, **calls: Callable[[], Tensor]) -> Feature:
        leaves: dict[str, Sequence[Tensor]] = {
            n: wide if n == "torch_efficient" else inputs for n in calls
        }
        return Feature(name, calls, leaves, grad_out, comparable)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    window = 1024 if shape is LONG else 256

    def windowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    yield feature(
        "causal", cudnn_ops=ours(is_causal=True), torch_cudnn=torchs(inputs, is_causal=True)
    )
    yield feature(
        f"window {window}",
        cudnn_ops=ours(is_causal=True, window_size=(window - 1, 0)),
        flex_attention=flex(visible=windowed),
    )
    if shape is LONG:
        return
    slopes = 2.0 ** -torch.linspace(0.25, 8, shape.heads, device=device)
    yield feature(
        "ALiBi",
        cudnn_ops=ours(is_causal=True, alibi_slopes=slopes),
        flex_attention=flex(lambda s, b, h, i, j: s - slopes[h] * (i - j), causal),
    )
    yield feature(
        "softcap",
        cudnn_ops=ours(is_causal=True, softcap=30.0),
        flex_attention=flex(lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), causal),
    )
    sinks = torch.zeros(shape.heads, device=device)
    yield feature("sinks", cudnn_ops=ours(is_causal=True, sinks=sinks))
    yield feature(
        "dropout",
        comparable=False,
        cudnn_ops=ours(is_causal=True, dropout_p=0.1),
        torch_cudnn=torchs(inputs, is_causal=True, dropout_p=0.1),
        torch_flash=torchs(inputs, is_causal=True, dropout_p=0.1),
    )
    yield feature("deterministic", cudnn_ops=ours(is_causal=True, deterministic=True))
    mask = torch.rand(length, length, device=device) < 0.9
    mask[:, 0] = True
    yield feature(
        "mask [S, S]",
        cudnn_ops=ours(attn_mask=mask),
        torch_efficient=torchs(wide, attn_mask=mask),
        flex_attention=flex(visible=lambda b, h, i, j: mask[i, j]),
    )
    bias = torch.randn(1, shape.heads, length, length, device=device, dtype=torch.bfloat16)
    bias.requires_grad_()
    everyone = bias.expand(shape.batch, -1, -1, -1)
    with_bias = feature(
        "bias [1, H, S, S] and its gradient",
        cudnn_ops=ours(attn_mask=bias),
        torch_efficient=torchs(wide, attn_mask=everyone),
        flex_attention=flex(lambda s, b, h, i, j: s + bias[0, h, i, j]),
    )
    for name, leaves in with_bias.leaves.items():
        with_bias.leaves[name] = (*leaves, bias)
    yield with_bias
    lengths = torch.full((shape.batch,), length, dtype=torch.int32, device=device)
    yield feature(
        "padding", cudnn_ops=ours(is_causal=True, seq_lens_q=lengths, seq_lens_kv=lengths)
    )
    offsets = torch.arange(shape.batch + 1, device=device, dtype=torch.int32) * length
    flat, wide_flat = (
        [t.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for t in batched]
        for batched in (inputs, wide)
    )
    packed = partial(
        torch.ops.cudnn_ops.varlen_attention, *flat, offsets, offsets, length, length, causal=True
    )
    yield Feature(
        "packed",
        {
            "cudnn_ops": packed,
            "torch_varlen": partial(torchs_varlen, wide_flat, offsets, length),
        },
        {"cudnn_ops": flat, "torch_varlen": wide_flat},
        grad_out.transpose(1, 2),
    )


def torchs_varlen(inputs: Sequence[Tensor], offsets: Tensor, length: int) -> Tensor:
    q, k, v = inputs
    out = varlen_attn(q, k, v, offsets, offsets, length, length, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out


if __name__ == "__main__":
    main("attention_features", run)
