"""The operators' decompositions: a program without operators of ours, in torch and in ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import cudnn_ops
from cudnn_ops.ops import inductor

BATCH, LENGTH = Dim("batch", min=2, max=64), Dim("length", min=2, max=512)


class Call(torch.nn.Module):
    """A function of tensors as a module, which is what is exported."""

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(*tensors))


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor):
    attend = cudnn_ops.scaled_dot_product_attention
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    used = torch.arange(query.shape[0]) % 3 + 1
    lengths: dict[str, Any] = {"seq_lens_q": used.int(), "seq_lens_kv": (used * 2 - 2).int()}
    yield attend(query, key, value, is_causal=True, enable_gqa=True)
    yield attend(query, key, value, scale=0.3, enable_gqa=True)
    yield attend(query, key, value, mask, enable_gqa=True, is_causal=True)
    yield attend(query, key, value, mask[0, 0] > 0.8, enable_gqa=True)
    yield attend(query, key, value, mask.expand(-1, 4, -1, -1) > 0, enable_gqa=True)
    yield attend(query, key, value, enable_gqa=True, window_size=(3, 2), bottom_right=True)
    yield attend(query, key, value, enable_gqa=True, softcap=2.0, alibi_slopes=slopes)
    yield attend(query, key, value, enable_gqa=True, sinks=sinks, **lengths)
    with_lse = cudnn_ops.scaled_dot_product_attention_with_lse
    yield from with_lse(query, key, value, enable_gqa=True, sinks=sinks, **lengths)
    yield from with_lse(
        query, key, value, enable_gqa=True, is_causal=True, bottom_right=True, **lengths
    )


def _packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, used: Tensor):
    attend, with_lse = cudnn_ops.varlen_attention, cudnn_ops.varlen_attention_with_lse
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    yield attend(q, k, v, starts, starts_k, 9, 11)
    yield attend(q, k, v, starts, starts_k, 9, 11, 0.0, 0.4, True, window_size=(4, 0))
    yield attend(q, k, v, starts, starts_k, 9, 11, causal=True, bottom_right=False)
    yield attend(q, q, q, starts, starts, 9, 9, causal=True, alibi_slopes=slopes, softcap=3.0)
    yield from with_lse(q, k, v, starts, starts_k, 9, 11, sinks=slopes, seqused_k=used)
    yield from with_lse(q, k, v, starts, starts_k, 9, 11, seqused_q=used, causal=True)


def _paged(query: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, starts: Tensor):
    attend, with_lse = cudnn_ops.paged_attention, cudnn_ops.paged_attention_with_lse
    key, value = cache[:, 0], cache[:, 1]
    sinks = torch.tensor([0.5, -0.25, 0.125, 3.0])
    yield attend(query, key, value, pages, lengths, is_causal=True)
    yield attend(query, key, value, pages, lengths, window_size=(2, 1), bottom_right=False)
    yield from with_lse(query, key, value, pages, lengths, window_size=(5, 0), sinks=sinks)
    heads_first = (cache.transpose(2, 3)[:, 0], cache.transpose(2, 3)[:, 1])
    yield attend(query, *heads_first, pages, lengths, softcap=2.0, scale=0.4, kv_layout="HND")
    packed: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 4, "is_causal": True}
    yield from with_lse(query.flatten(0, 1)[:10], key, value, pages, lengths, **packed)


def _pointwise(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor):
    size = (x.shape[-1],)
    yield cudnn_ops.rms_norm(x, size, weight)
    yield cudnn_ops.rms_norm(x, size, None, 1e-3)
    yield cudnn_ops.layer_norm(x, size, weight, bias, zero_centered=True)
    yield cudnn_ops.layer_norm(x, size)
    yield from cudnn_ops.add_rms_norm(x, y, size, weight, zero_centered=True)
    yield from cudnn_ops.add_layer_norm(x, y, size, weight, bias, 1e-4)
    modulation = x[:, :1].sin(), y[:, :1], x[:, :1]
    yield cudnn_ops.adaptive_layer_norm(x, *modulation[:2], weight=weight, bias=bias)
    yield cudnn_ops.adaptive_rms_norm(x, modulation[0], eps=1e-3)
    yield from cudnn_ops.gate_add_adaptive_layer_norm(x, y, *modulation)
    yield from cudnn_ops.gate_add_adaptive_rms_norm(x, y, x[:, 0], weight=weight)
    yield cudnn_ops.swiglu(x, y)
    yield cudnn_ops.geglu(x, y)
    yield cudnn_ops.geglu(x, y, approximate="tanh")
    heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
    cos, sin = y[:1, :, :8].cos(), y[:1, :, :8].sin()
    yield cudnn_ops.rotary_embedding(heads, cos, sin)
    positions = torch.ones(1, heads.shape[2], dtype=torch.int64, device=x.device)
    yield from cudnn_ops.rotary_embedding_qk(
        *(heads, heads[:, :1], cos[0, :, :2], sin[0, :, :2]),
        interleaved=True,
        rotary_dim=4,
        positions=positions,
    )


def _convolutions(x: Tensor, weight: Tensor, bias: Tensor, volume: Tensor, kernel: Tensor):
    yield cudnn_ops.group_norm(x, 2, None, None, 1e-4)
    yield cudnn_ops.batch_norm(x, bias, bias.square() + 1, residual=x, activation="relu")
    yield cudnn_ops.max_pool2d(x, 3, 2, 1)
    yield cudnn_ops.max_pool2d(x[0], (2, 1))
    yield cudnn_ops.max_pool2d(volume[:, :, 0], (2, 3), 2, 1, ceil_mode=True)
    sums = volume.sum((0, 2, 3, 4)).square()
    yield cudnn_ops.batch_norm(volume, sums, sums, eps=1e-3)
    yield cudnn_ops.instance_norm(x, None, None, bias, bias, activation="silu")
    yield cudnn_ops.instance_norm(x, bias, bias.square() + 1, use_input_stats=False)
    yield cudnn_ops.group_norm(x, 3, bias, bias, activation="silu")
    yield from cudnn_ops.add_group_norm(volume, volume.sin(), 1, activation="silu")
    yield cudnn_ops.conv2d(x, weight, bias, 2, (1, 0), 2, activation="relu")
    yield cudnn_ops.conv2d(x, weight[:, :2], None, padding=1, groups=3, activation="silu")
    yield cudnn_ops.conv2d(x, weight, bias, padding="same", activation="gelu", residual=x)
    yield cudnn_ops.conv2d(x, weight[:, :, :2, :2], padding="same", activation="gelu_tanh")
    yield cudnn_ops.conv2d(x, weight, bias, activation="relu6")
    yield cudnn_ops.conv2d(x, weight, bias, activation="hardswish")
    yield cudnn_ops.conv2d(x, weight, bias, activation="leaky_relu")
    yield cudnn_ops.conv1d(x[:, :, 0], weight[:, :, 0], bias, padding=1)
    yield cudnn_ops.conv3d(volume, kernel, stride=(1, 2, 1), padding="valid")
    yield cudnn_ops.conv_transpose2d(x, weight, bias, 2, 1, 1, activation="silu")
    yield cudnn_ops.conv_transpose2d(x, weight[:, :2], None, groups=3, residual=None)
    yield cudnn_ops.conv_transpose1d(x[:, :, 0], weight[:, :, 0], bias, 2, activation="relu")
    yield cudnn_ops.conv_transpose3d(volume, kernel.transpose(0, 1), stride=(1, 2, 1))


def _mixtures(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor):
    rows, offsets, positions = cudnn_ops.moe_permute(x, experts, 4)
    yield from (rows, offsets, positions)
    yield cudnn_ops.moe_combine(rows, positions)
    yield cudnn_ops.moe_experts(x, experts, weights, gate_up, down)


def _layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor):
    yield cudnn_ops.linear(x, w1)
    yield cudnn_ops.linear(x, w1, b1, activation="gelu_tanh")
    yield cudnn_ops.linear(x, w1[:8], None, activation="relu", residual=x)
    yield cudnn_ops.mlp(x, w1, b1, w2, b2)
    yield cudnn_ops.mlp(x, w1, b1, w2[:, :6], b2, "silu", gated=True)


def _dense(batch: int, length: int, length_kv: int) -> tuple[Tensor, ...]:
    query = _draw(batch, length, 4, 16).transpose(1, 2)
    key, value = _draw(batch, length_kv, 2, 16), _draw(batch, length_kv, 2, 24, seed=1)
    mask = _draw(batch, 1, length, length_kv)
    return query, key.transpose(1, 2), value.transpose(1, 2), mask, _draw(4)


def _sequences(lengths: list[int], lengths_k: list[int], used: list[int]) -> tuple[Tensor, ...]:
    def starts(of: list[int]) -> Tensor:
        return torch.tensor([0, *of]).cumsum(0).int()

    q, k = _draw(sum(lengths), 4, 16), _draw(sum(lengths_k), 2, 16)
    v = _draw(sum(lengths_k), 2, 8, seed=1)
    return q, k, v, starts(lengths), starts(lengths_k), torch.tensor(used).int()


def _pages(batch: int, lengths: list[int], starts: list[int]) -> tuple[Tensor, ...]:
    cache = _draw(12, 2, 4, 2, 16)
    cache[11] = torch.nan  # a page that nobody has
    pages = torch.randperm(11, generator=torch.Generator().manual_seed(1))[: batch * 3]
    table = pages.view(batch, 3).int()
    table[0, 2] = 1 << 20
    return (
        _draw(batch, 4, 4, 16),
        cache,
        table,
        torch.tensor(lengths).int(),
        torch.tensor(starts).int(),
    )


def _mixture(experts: list[list[int]]) -> tuple[Tensor, ...]:
    count = len(experts)
    weights = _draw(count, 2)
    return _draw(count, 8), torch.tensor(experts), weights, _draw(4, 12, 8), _draw(4, 8, 6)


#: Function, arguments, its dynamic dimensions, and arguments of other sizes.
CASES: dict[str, tuple[Any, tuple[Tensor, ...], Any, tuple[Tensor, ...]]] = {
    "attention": (
        _attention,
        _dense(3, 7, 9),
        (
            {0: BATCH, 2: LENGTH},
            {0: BATCH, 2: Dim("length_kv", min=2, max=512)},
            {0: BATCH, 2: Dim("length_kv", min=2, max=512)},
            {0: BATCH, 2: LENGTH, 3: Dim("length_kv", min=2, max=512)},
            None,
        ),
        _dense(5, 11, 8),
    ),
    "packed": (
        _packed,
        _sequences([3, 0, 5, 4], [3, 2, 5, 11], [2, 0, 5, 1]),
        ({0: Dim("tokens")}, {0: Dim("keys")}, {0: Dim("keys")}, None, None, None),
        _sequences([9, 6, 1, 1], [9, 4, 0, 2], [9, 0, 0, 1]),
    ),
    "paged": (
        _paged,
        _pages(3, [7, 0, 12], [0, 4, 7, 10]),
        None,
        _pages(3, [4, 11, 5], [0, 2, 6, 10]),
    ),
    "pointwise": (
        _pointwise,
        (_draw(3, 5, 32), _draw(3, 5, 32, seed=1), _draw(32), _draw(32, seed=1)),
        ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: LENGTH}, None, None),
        (_draw(2, 9, 32), _draw(2, 9, 32, seed=1), _draw(32), _draw(32, seed=1)),
    ),
    "layers": (
        _layers,
        (_draw(3, 5, 8), _draw(12, 8), _draw(12), _draw(8, 12), _draw(8)),
        ({0: BATCH, 1: LENGTH}, None, None, None, None),
        (_draw(2, 9, 8), _draw(12, 8), _draw(12), _draw(8, 12), _draw(8)),
    ),
    "mixtures": (
        _mixtures,
        _mixture([[0, 3], [3, 1], [-1, 2], [3, 0], [2, 3]]),
        ({0: BATCH}, {0: BATCH}, {0: BATCH}, None, None),
        _mixture([[3, 1], [-1, -1], [1, 3]]),
    ),
    "convolutions": (
        _convolutions,
        (
            _draw(3, 6, 9, 9),
            _draw(6, 6, 3, 3),
            _draw(6),
            _draw(2, 4, 4, 5, 3),
            _draw(3, 4, 2, 3, 1),
        ),
        ({0: BATCH, 2: Dim("height", min=5, max=64)}, None, None, None, None),
        (
            _draw(2, 6, 7, 9),
            _draw(6, 6, 3, 3),
            _draw(6),
            _draw(2, 4, 4, 5, 3),
            _draw(3, 4, 2, 3, 1),
        ),
    ),
}


@cache
def _program(name: str) -> torch.export.ExportedProgram:
    function, args, dynamic, _ = CASES[name]
    shapes = None if dynamic is None else (dynamic,)
    program = torch.export.export(Call(function), args, dynamic_shapes=shapes)
    return program.run_decompositions(cudnn_ops.decompositions())


def _operators(program: torch.export.ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_ours_is_left_and_results_are_equal(name):
    function, args, _, others = CASES[name]
    program = _program(name)
    assert not {op for op in _operators(program) if "cudnn_ops" in op}
    for given in (args, others):
        expected, actual = Call(function)(*given), program.module()(*given)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert one.stride() == other.stride()


@pytest.mark.parametrize("name", CASES)
def test_onnx_runtime_computes_the_same(name):
    import onnxruntime  # here: a machine with a GPU may lack it, and runs other tests of this file

    function, args, _, others = CASES[name]
    exported = torch.onnx.export(_program(name), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(exported.model_proto.SerializeToString())
    for given in (args, others):
        named = {f"tensors_{i}": tensor.numpy() for i, tensor in enumerate(given)}
        actual = session.run(None, {one.name: named[one.name] for one in session.get_inputs()})
        for one, other in zip(actual, Call(function)(*given), strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other, rtol=2e-5, atol=2e-5)


def test_low_precision_keeps_its_dtype():
    """Products and sums are float32, as the operators'; only the results are rounded."""
    table, ops = cudnn_ops.decompositions(), torch.ops.cudnn_ops
    query, key, value, mask, sinks = (tensor.bfloat16() for tensor in _dense(3, 7, 9))
    x, y, weight = (_draw(5, 32, seed=seed).bfloat16() for seed in range(3))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ops.sdpa.default, (query, key, value, mask), {"enable_gqa": True, "sinks": sinks}),
        (ops.sdpa_with_lse.default, (query, key, value), {"enable_gqa": True}),
        (ops.rms_norm.default, (x, [32], weight[0].float()), {}),
        (ops.add_layer_norm.default, (x, y, [32], weight[0], weight[1]), {}),
        (ops.geglu.default, (x, y), {}),
    ]
    for op, args, options in calls:
        found, expected = table[op](*args, **options), op(*args, **options)
        torch.testing.assert_close(found, expected, rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize(
    ("query", "key", "value", "mask", "enable_gqa"),
    [
        ((7, 16), (9, 16), (9, 8), None, False),
        ((4, 7, 16), (4, 9, 16), (4, 9, 8), (4, 7, 9), False),
        ((2, 3, 4, 7, 16), (2, 3, 4, 9, 16), (2, 3, 4, 9, 8), (3, 1, 7, 9), False),
        ((5, 4, 7, 16), (1, 1, 9, 16), (5, 4, 9, 8), (5, 1, 1, 9), False),
        ((4, 7, 16), (3, 2, 9, 16), (2, 9, 8), None, True),
    ],
)
def test_any_number_of_dimensions(query, key, value, mask, enable_gqa):
    """As torch's own attention takes them, whatever the operator does."""
    q, k, v = (_draw(*shape) for shape in (query, key, value))
    bias = None if mask is None else _draw(*mask)
    attend = cudnn_ops.decompositions()[torch.ops.cudnn_ops.sdpa_with_lse.default]
    out, lse = attend(q, k, v, bias, is_causal=mask is None, enable_gqa=enable_gqa)
    keys, values = k, v
    if enable_gqa:
        keys, values = (t.repeat_interleave(2, -3) for t in (k, v))
    scores = q @ keys.transpose(-1, -2) / 4
    if bias is None:
        scores = scores.masked_fill(torch.ones(7, 9).tril() == 0, -torch.inf)
    else:
        scores = scores + bias
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1).expand(expected.shape[:-1]))
    plain = cudnn_ops.decompositions()[torch.ops.cudnn_ops.sdpa.default]
    torch.testing.assert_close(
        plain(q, k, v, bias, is_causal=mask is None, enable_gqa=enable_gqa), expected
    )


def test_every_operator_has_one():
    """But those that return nothing, are derivatives, or are asked about plans and checks."""
    named = {one for one in inductor.operators() if not one.name().startswith("cudnn_ops::_")}
    assert named >= {torch.ops.cudnn_ops.sdpa.default, torch.ops.cudnn_ops.conv2d.padding}
    missing = named - set(cudnn_ops.decompositions())
    assert missing == {torch.ops.cudnn_ops.paged_kv_append_.default}


def test_dropout_has_none():
    query = _draw(1, 2, 8, 16)
    call = Call(lambda q: [cudnn_ops.scaled_dot_product_attention(q, q, q, dropout_p=0.5)])
    program = torch.export.export(call, (query,))
    with pytest.raises(NotImplementedError, match=r"model\.eval\(\)"):
        program.run_decompositions(cudnn_ops.decompositions())
