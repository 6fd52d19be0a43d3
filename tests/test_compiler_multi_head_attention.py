"""``nn.MultiheadAttention`` and what is built of it: projections, and attention without copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_ops
from tests.cases.compiler import Rewritten, check_swap

B, S, E, H = 2, 7, 32, 4
NAME = "multi_head_attention"


def _tensors(*lengths: int) -> list[Tensor]:
    """Inputs, and the weights and biases of both projections."""
    weights = torch.randn(3 * E, E) / E**0.5, torch.randn(3 * E), torch.randn(E, E) / E**0.5
    inputs = [torch.randn(length, B, E) for length in lengths]
    return [one.double() for one in (*inputs, *weights, torch.randn(E))]


def _forward(q: Tensor, kv: Tensor, w: Any, b: Any, w_out: Tensor, b_out: Any, **options: Any):
    settings: dict[str, Any] = {"need_weights": False, **options}
    added = [settings.pop(name, None) for name in ("bias_k", "bias_v")]
    zero, dropout_p = settings.pop("add_zero_attn", False), settings.pop("dropout_p", 0.0)
    return F.multi_head_attention_forward(
        *(q, kv, kv, E, H, w, b, *added, zero, dropout_p, w_out, b_out), **settings
    )


def test_of_one_input():
    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors)[0]

    found = check_swap(attend, *_tensors(S), expect=[NAME])
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.sdpa.default"]


def test_of_two_inputs():
    def attend(*tensors: Tensor) -> Tensor:
        return _forward(*tensors)[0]

    check_swap(attend, *_tensors(S, 5), expect=[NAME])


def test_without_biases():
    def attend(x: Tensor, w: Tensor, _: Tensor, w_out: Tensor, __: Tensor) -> Tensor:
        return _forward(x, x, w, None, w_out, None)[0]

    def of_two(q: Tensor, kv: Tensor, w: Tensor, _: Tensor, w_out: Tensor, __: Tensor) -> Tensor:
        return _forward(q, kv, w, None, w_out, None)[0]

    check_swap(attend, *_tensors(S), expect=[NAME])
    check_swap(of_two, *_tensors(S, 3), expect=[NAME])


def test_weights_that_nobody_reads():
    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors, need_weights=True)[0]

    check_swap(attend, *_tensors(S), expect=[NAME])


def test_a_mask_that_is_said_to_be_causal():
    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        mask = torch.full((S, S), float("-inf"), dtype=x.dtype).triu(1)
        return _forward(x, x, *tensors, attn_mask=mask, is_causal=True)[0]

    found = check_swap(attend, *_tensors(S), expect=[NAME])
    assert found.ours[0].args[5] is True


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_module(batch_first):
    module = nn.MultiheadAttention(E, H, 0.3, batch_first=batch_first).eval()

    def attend(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    check_swap(attend, torch.randn(B, S, E), expect=[NAME])


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_of_torch(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 48, 0.0, batch_first=True, norm_first=norm_first)
    check_swap(layer, torch.randn(B, S, E), expect=[NAME], swap=[NAME])


def test_any_length():
    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors)[0]

    tensors = _tensors(S)
    found = Rewritten(attend, dynamic=True)
    for length in (7, 9, 12):
        x = torch.randn(length, B, E).double()
        torch.testing.assert_close(found(x, *tensors[1:]), attend(x, *tensors[1:]))
    assert found.swapped == [NAME]


def test_dropout_is_that_of_the_operator():
    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors, dropout_p=0.25)[0]

    def idle(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors, dropout_p=0.25, training=False)[0]

    found = Rewritten(attend)
    found(*_tensors(S))
    assert found.ours[0].args[4] == 0.25
    check_swap(idle, *_tensors(S), expect=[NAME])


def _weights_read(x: Tensor, *tensors: Tensor) -> Any:
    return _forward(x, x, *tensors, need_weights=True)


def _mask(x: Tensor, *tensors: Tensor) -> Tensor:
    return _forward(x, x, *tensors, attn_mask=torch.eye(S, dtype=torch.bool))[0]


def _mask_with_weights(x: Tensor, *tensors: Tensor) -> Tensor:
    mask = torch.eye(S, dtype=torch.bool)
    return _forward(x, x, *tensors, attn_mask=mask, is_causal=True, need_weights=True)[0]


def _padding(x: Tensor, *tensors: Tensor) -> Tensor:
    padding = torch.arange(S).expand(B, S) > 4
    return _forward(x, x, *tensors, key_padding_mask=padding)[0]


def _zero_key(x: Tensor, *tensors: Tensor) -> Tensor:
    return _forward(x, x, *tensors, add_zero_attn=True)[0]


def _added_key(x: Tensor, *tensors: Tensor) -> Tensor:
    more = x[:1, :1]
    return _forward(x, x, *tensors, bias_k=more, bias_v=more)[0]


def _other_values(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    parts = (x, x, x + 1, E, H, w, b, None, None, False, 0.0, w_out, b_out)
    return F.multi_head_attention_forward(*parts, need_weights=False)[0]


def _separate(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    q, k, v = w.chunk(3)
    weights = {"q_proj_weight": q, "k_proj_weight": k, "v_proj_weight": v}
    return _forward(x, x, None, b, w_out, b_out, use_separate_proj_weight=True, **weights)[0]


def _no_batch(x: Tensor, *tensors: Tensor) -> Tensor:
    return _forward(x[:, 0], x[:, 0], *tensors)[0]


NEAR_MISSES = [
    *(_weights_read, _mask, _mask_with_weights, _padding, _zero_key, _added_key),
    *(_other_values, _separate, _no_batch),
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_is_more_than_that(near_miss):
    found = check_swap(near_miss, *_tensors(S), expect=[])
    assert all(candidate.reason for candidate in found.report)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_self", [False, True])
def test_on_a_gpu(is_self, is_causal):
    """Compiled, in bfloat16, as right as torch is."""

    def attend(q: Tensor, kv: Tensor, *tensors: Tensor) -> Tensor:
        mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": True} if is_causal else {}
        parts = (q, q if is_self else kv, *tensors)
        return F.multi_head_attention_forward(
            *(parts[0], parts[1], parts[1], 256, 4, parts[2], parts[3], None, None, False, 0.0),
            *(parts[4], parts[5]),
            need_weights=False,
            **options,
        )[0]

    torch.manual_seed(0)
    sizes = ((197, 3, 256),) * 2 + ((768, 256), (768,), (256, 256), (256,))
    exact = [torch.randn(size) / (16 if len(size) == 2 else 1) for size in sizes]
    exact = [one.bfloat16().double().cuda().requires_grad_() for one in exact]
    ours, torchs = ([one.detach().bfloat16().requires_grad_() for one in exact] for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="cudnn_ops", options={"swap": [NAME]})
    cudnn_ops.compile_report().clear()
    results = []
    for function, tensors in ((compiled, ours), (attend, torchs), (attend, exact)):
        out = function(*tensors)
        out.double().sin().sum().backward()
        grads = [one.grad for one in tensors if one.grad is not None]
        results.append([out.detach(), *grads])
    assert len(cudnn_ops.compile_report().swapped) == 1
    for mine, other, right in zip(*results, strict=True):
        errors = [float((one.double() - right).norm() / right.norm()) for one in (mine, other)]
        assert errors[0] <= 2 * errors[1] + 1e-3
