"""What a backward reads of its forward: hooks, changes in place, checkpoints."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import cudnn_ops
from cudnn_ops.ops.conv import Activation
from tests.cases.derivatives import DERIVATIVES
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _transposed(tensor: Tensor) -> Tensor:
    """The first dimension is the innermost in memory."""
    backwards = tuple(reversed(range(tensor.dim())))
    return tensor.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)


def _strided(tensor: Tensor) -> Tensor:
    """Every other number in memory is another's."""
    other = torch.full_like(tensor, 1 if tensor.dtype == torch.bool else 77)
    return torch.stack([tensor, other], -1)[..., 0]


HOOKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "contiguous": lambda: saved_tensors_hooks(Tensor.detach, _contiguous),
    "transposed": lambda: saved_tensors_hooks(Tensor.detach, _transposed),
    "strided": lambda: saved_tensors_hooks(Tensor.detach, _strided),
    "on_cpu": save_on_cpu,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("derivative", DERIVATIVES, ids=str)
def test_hooks_bring_tensors_back_in_any_memory_format(derivative, hooks, device):
    derivative.check(device, HOOKS[hooks]())


@dataclass(frozen=True)
class Call:
    """A call of one operator, whose results have one Node."""

    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    unread: tuple[str, ...] = ()
    """Which of them the backward does not read."""
    results: int = 0
    """How many results of the forward it reads."""

    def outputs(self) -> list[Tensor]:
        out = self.function(**self.tensors)
        return list(out) if isinstance(out, tuple) else [out]


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def _heads(prefix: str = "") -> dict[str, Tensor]:
    names = ("q", "k", "v") if prefix else ("query", "key", "value")
    shape = (12, 2, 16) if prefix else (2, 2, 6, 16)
    return {name: _leaf(*shape) for name in names}


def _attend(**tensors: Tensor) -> Any:
    dropout_p = 0.3 if "rng_state" in tensors else 0.0
    return _ops.sdpa_with_lse(**tensors, dropout_p=dropout_p, is_causal=True)


def _attend_packed(**tensors: Tensor) -> Any:
    dropout_p = 0.3 if "rng_state" in tensors else 0.0
    return _ops.varlen_attention_with_lse(
        **tensors, max_seqlen_q=6, max_seqlen_k=6, dropout_p=dropout_p, causal=True
    )


def _convolve(activation: Activation) -> Callable[..., Any]:
    return functools.partial(cudnn_ops.conv2d, activation=activation)


def _calls() -> dict[str, Call]:
    torch.manual_seed(0)
    lens = torch.tensor([4, 6], dtype=torch.int32)
    offsets = torch.tensor([0, 6, 12], dtype=torch.int32)
    image = {
        "input": _leaf(2, 3, 5, 5),
        "weight": _leaf(4, 3, 3, 3),
        "bias": _leaf(4),
        "residual": _leaf(2, 4, 3, 3),
    }
    rows = {"input": _leaf(3, 8), "weight": _leaf(8)}
    layer = {"input": _leaf(3, 8), "weight": _leaf(4, 8), "bias": _leaf(4), "residual": _leaf(3, 4)}
    layers = {"x": _leaf(3, 8), "w1": _leaf(6, 8), "b1": _leaf(6), "w2": _leaf(4, 6)}
    return {
        "bias": Call(_attend, {**_heads(), "attn_mask": _leaf(1, 2, 6, 6)}, results=2),
        "lengths": Call(
            _attend,
            {
                **_heads(),
                "seq_lens_q": lens.clone(),
                "seq_lens_kv": lens.clone(),
                "alibi_slopes": torch.rand(2),
                "sinks": _leaf(2),
            },
            results=2,
        ),
        "sinks_without_gradient": Call(
            _attend, {**_heads(), "sinks": torch.randn(2)}, ("sinks",), 2
        ),
        "dropout": Call(_attend, {**_heads(), "rng_state": torch.tensor([3, 4])}, results=2),
        "packed": Call(
            _attend_packed,
            {
                **_heads("packed"),
                "cu_seqlens_q": offsets.clone(),
                "cu_seqlens_k": offsets.clone(),
                "seqused_q": lens.clone(),
                "seqused_k": lens.clone(),
                "alibi_slopes": torch.rand(2),
                "sinks": _leaf(2),
                "rng_state": torch.tensor([3, 4]),
            },
            results=2,
        ),
        "rms_norm": Call(
            lambda input, weight: cudnn_ops.rms_norm(input, (8,), weight), rows, (), 2
        ),
        "layer_norm": Call(
            lambda input, weight, bias: cudnn_ops.layer_norm(input, (8,), weight, bias),
            {**rows, "bias": _leaf(8)},
            ("bias",),
            2,
        ),
        "add_rms_norm": Call(
            lambda input, residual, weight: cudnn_ops.add_rms_norm(input, residual, (8,), weight),
            {**rows, "residual": _leaf(3, 8)},
            ("input", "residual"),
            3,
        ),
        "group_norm": Call(
            lambda input, weight, bias: cudnn_ops.group_norm(input, 2, weight, bias),
            {"input": _leaf(3, 8, 5), "weight": _leaf(8), "bias": _leaf(8)},
            (),
            2,
        ),
        "add_group_norm": Call(
            lambda input, residual, weight: cudnn_ops.add_group_norm(
                input, residual, 2, weight, activation="silu"
            ),
            {"input": _leaf(3, 8, 5), "residual": _leaf(3, 8, 5), "weight": _leaf(8)},
            ("input", "residual"),
            3,
        ),
        "batch_norm": Call(
            lambda input, weight, bias, residual: cudnn_ops.batch_norm(
                input, None, None, weight, bias, True, residual=residual
            ),
            {
                "input": _leaf(3, 8, 5),
                "weight": _leaf(8),
                "bias": _leaf(8),
                "residual": _leaf(3, 8, 5),
            },
            ("bias", "residual"),
            2,
        ),
        "batch_norm_relu": Call(
            lambda input, weight: cudnn_ops.batch_norm(
                input, None, None, weight, training=True, activation="relu"
            ),
            {"input": _leaf(3, 8, 5), "weight": _leaf(8)},
            (),
            3,
        ),
        "max_pool2d": Call(
            lambda input: cudnn_ops.max_pool2d(input, 3, 2, 1),
            {"input": _leaf(2, 3, 8, 5)},
            ("input",),
            1,
        ),
        "adaptive_layer_norm": Call(
            lambda input, scale, shift: cudnn_ops.adaptive_layer_norm(input, scale, shift),
            {"input": _leaf(3, 4, 8), "scale": _leaf(3, 8), "shift": _leaf(3, 8)},
            (),
            2,
        ),
        "gate_add_adaptive_rms_norm": Call(
            lambda input, update, gate, scale, weight: cudnn_ops.gate_add_adaptive_rms_norm(
                input, update, gate, scale, weight=weight
            ),
            {
                **{name: _leaf(3, 4, 8) for name in ("input", "update")},
                **{name: _leaf(3, 8) for name in ("gate", "scale")},
                "weight": _leaf(8),
            },
            ("input",),
            3,
        ),
        "conv": Call(_convolve("none"), image, ("bias", "residual")),
        "conv_relu": Call(_convolve("relu"), image, ("bias", "residual"), 1),
        "conv_gelu": Call(_convolve("gelu"), image, ("bias", "residual"), 1),
        "linear": Call(cudnn_ops.linear, layer, ("bias", "residual")),
        "linear_gelu": Call(
            functools.partial(cudnn_ops.linear, activation="gelu"), layer, ("bias", "residual"), 1
        ),
        "mlp": Call(functools.partial(cudnn_ops.mlp, b2=None), layers, ("b1",), 2),
        "mlp_relu": Call(
            functools.partial(cudnn_ops.mlp, b2=None, activation="relu"), layers, ("b1",), 1
        ),
        "moe_permute": Call(
            lambda input, experts: cudnn_ops.moe_permute(input, experts, 3)[0],
            {"input": _leaf(4, 8), "experts": torch.tensor([[0, 2], [1, 0], [2, -1], [0, 1]])},
            ("input", "experts"),
            1,
        ),
        "moe_combine": Call(
            cudnn_ops.moe_combine,
            {
                "rows": _leaf(4, 8),
                "positions": torch.tensor([[0, 3], [2, 1]], dtype=torch.int32),
                "weights": _leaf(2, 2),
            },
        ),
        "moe_combine_fixed": Call(
            cudnn_ops.moe_combine,
            {
                "rows": _leaf(4, 8),
                "positions": torch.tensor([[0, 3], [2, 1]], dtype=torch.int32),
                "weights": torch.rand(2, 2),
            },
            ("rows",),
        ),
        "grouped_linear": Call(
            cudnn_ops.grouped_linear,
            {
                "input": _leaf(5, 8),
                "weight": _leaf(2, 4, 8),
                "offsets": torch.tensor([2, 5], dtype=torch.int32),
            },
        ),
        "swiglu": Call(cudnn_ops.swiglu, {"gate": _leaf(3, 8), "up": _leaf(3, 8)}),
        "rotary": Call(
            cudnn_ops.rotary_embedding,
            {
                "input": _leaf(1, 2, 3, 8),
                "cos": torch.randn(1, 3, 8),
                "sin": torch.randn(1, 3, 8),
            },
            ("input",),
        ),
        "rotary_of_both": Call(
            functools.partial(cudnn_ops.rotary_embedding_qk, interleaved=True),
            {
                "query": _leaf(1, 2, 3, 8),
                "key": _leaf(1, 1, 3, 8),
                "cos": torch.randn(4, 8),
                "sin": torch.randn(4, 8),
                "positions": torch.tensor([[3, 0, 1]]),
            },
            ("query", "key"),
        ),
    }


CALLS = _calls()
TENSORS = [(call, name) for call in CALLS for name in CALLS[call].tensors]


@pytest.mark.parametrize("call", CALLS)
def test_hooks_see_all_that_a_backward_reads(call):
    """They offload it, or drop it at a checkpoint; what they do not see stays where it is."""
    of, seen = CALLS[call], []
    with saved_tensors_hooks(seen.append, lambda packed: packed):
        of.outputs()
    assert len(seen) == len(of.tensors) - len(of.unread) + of.results


@pytest.mark.parametrize(("call", "name"), TENSORS)
def test_a_change_in_place_before_the_backward_is_an_error(call, name):
    of = CALLS[call]
    outputs = of.outputs()
    changed = of.tensors[name]
    with torch.no_grad():
        changed.copy_(changed.clone())
    loss = sum(output.sum() for output in outputs)
    assert isinstance(loss, Tensor)
    if name in of.unread:
        return loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("call", CALLS)
def test_no_result_is_kept_by_itself(call):
    """A Node that owned its own output would never be freed."""
    outputs = [weakref.ref(output) for output in CALLS[call].outputs()]
    assert [output() for output in outputs] == [None] * len(outputs)


def test_one_tensor_of_offsets_is_saved_once():
    """Which plan a self-attention takes depends on that, and what its dropout drops too."""
    offsets, seen = torch.tensor([0, 6, 12]), []
    with saved_tensors_hooks(seen.append, lambda packed: packed):
        _attend_packed(**_heads("packed"), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert len(seen) == 6
    out, _ = _attend_packed(**_heads("packed"), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    offsets.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_tanh"])
def test_a_checkpoint_keeps_nothing_of_a_convolution(activation):
    shape = (8, 64, 64, 64)
    image = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    image = image.to(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        for _ in range(3):
            x = cudnn_ops.conv2d(x, weight, padding=1, activation=activation)
        return x

    expected = torch.autograd.grad(layer(image).float().sum(), weight)[0]
    before = torch.cuda.memory_allocated()
    out = checkpoint(layer, image, use_reentrant=False)
    assert torch.cuda.memory_allocated() - before < 1.1 * out.nbytes
    grad = torch.autograd.grad(out.float().sum(), weight)[0]
    assert (grad - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_through_any_one_of_the_results(device):
    """What it does not depend on gets zeros, as from any operator."""
    q, k, v = (torch.randn(12, 2, 64, device=device).half().requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    lse = cudnn_ops.varlen_attention_with_lse(q, k, v, offsets, offsets, 7, 7)[1]
    *_, grad = torch.autograd.grad(lse.sum(), (q, k, v))
    assert not grad.any()
    lse = cudnn_ops.varlen_attention_with_lse(q, k, v, offsets, offsets, 7, 7)[1]
    assert not torch.autograd.grad(lse.sum(), v)[0].any()

    parts = [cudnn_ops.varlen_attention_with_lse(q, k, v, offsets, offsets, 7, 7) for _ in "ab"]
    merged = cudnn_ops.merge_attention_states(*parts[0], *parts[1])[1]
    assert not torch.autograd.grad(merged.sum(), v)[0].any()

    x, residual, weight, bias = (
        torch.randn(shape, device=device, requires_grad=True) for shape in (*[(3, 64)] * 2, 64, 64)
    )
    total = cudnn_ops.add_layer_norm(x, residual, (64,), weight, bias)[1]
    grads = torch.autograd.grad(total.sum(), (x, residual, weight, bias))
    assert [grad.mean().item() for grad in grads] == [1, 1, 0, 0]


@pytest.mark.parametrize("call", CALLS)
def test_a_second_backward_is_an_error(call):
    loss = sum(output.sum() for output in CALLS[call].outputs())
    assert isinstance(loss, Tensor)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
