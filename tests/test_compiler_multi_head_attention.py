"""``nn.MultiheadAttention`` and what is built of it: projections, and attention without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cudnn_ops
from tests.cases.attention_graphs import mask_as, told
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


def test_weights_of_which_nothing_comes():
    """As in WavLM."""

    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        out, weights = _forward(x, x, *tensors, need_weights=True)
        weights[:, None].broadcast_to(B, H, S, S)
        return out

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


def _causal(x: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf"), dtype=x.dtype).triu(1)


def _padding(x: Tensor) -> Tensor:
    return torch.arange(S).expand(B, S) > torch.tensor([4, S])[:, None]


def _of_heads(x: Tensor) -> Tensor:
    return torch.arange(B * H * S * S).view(B * H, S, S) % 3 == 1


MASKS: dict[str, tuple[Callable[[Tensor], dict[str, Any]], bool, bool]] = {
    # Masks, whether attention is causal then, and whether it has a tensor.
    "causal": (lambda x: {"attn_mask": _causal(x)}, True, False),
    "causal, hidden": (lambda x: {"attn_mask": _causal(x) < 0}, True, False),
    "causal, with weights": (
        lambda x: {"attn_mask": _causal(x), "is_causal": True, "need_weights": True},
        *(True, False),
    ),
    "some": (lambda x: {"attn_mask": torch.eye(S, dtype=torch.bool)}, False, True),
    "of heads": (lambda x: {"attn_mask": _of_heads(x)}, False, True),
    "added": (lambda x: {"attn_mask": _of_heads(x).to(x.dtype) * -2}, False, True),
    "padding": (lambda x: {"key_padding_mask": _padding(x)}, False, True),
    "padding, added": (lambda x: {"key_padding_mask": _padding(x) * x[0, 0, 0]}, False, True),
    "padding, causal": (
        lambda x: {"key_padding_mask": _padding(x), "attn_mask": _causal(x), "is_causal": True},
        *(True, True),
    ),
    "padding, and said to be causal": (
        lambda x: {
            "key_padding_mask": _padding(x),
            "attn_mask": torch.eye(S, dtype=torch.bool),
            "is_causal": True,
        },
        *(False, True),
    ),
    "padding, of heads": (
        lambda x: {"key_padding_mask": _padding(x), "attn_mask": _of_heads(x)},
        *(False, True),
    ),
    "padding, added to heads": (
        lambda x: {"key_padding_mask": _padding(x), "attn_mask": _of_heads(x).to(x.dtype)},
        *(False, True),
    ),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    masks, is_causal, has_tensor = MASKS[name]

    def attend(x: Tensor, *tensors: Tensor) -> Tensor:
        return _forward(x, x, *tensors, **masks(x))[0]

    found = check_swap(attend, *_tensors(S), expect=[NAME])
    assert told(found) == mask_as(causal=is_causal, mask=has_tensor)


def test_values_of_another_input():
    """As in DETR, whose queries and keys have positions."""

    def attend(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        parts = (E, H, w, b, None, None, False, 0.0, w_out, b_out)
        moved = x + 1
        return F.multi_head_attention_forward(moved, moved, x, *parts, need_weights=False)[0]

    def of_three(x: Tensor, y: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
        w, b, w_out, b_out = tensors
        parts = (E, H, w, b, None, None, False, 0.0, w_out, b_out)
        return F.multi_head_attention_forward(x, y, z, *parts, need_weights=False)[0]

    check_swap(attend, *_tensors(S), expect=[NAME])
    check_swap(of_three, *_tensors(S, 5, 5), expect=[NAME])


@pytest.mark.parametrize("has_empty", [False, True])
def test_weights_that_are_several_tensors(has_empty):
    """As where keys and values have other sizes; beside an empty one, as in WavLM."""

    def attend(x: Tensor, w: Tensor, b: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        q, k, v = w.chunk(3)
        weights = {"q_proj_weight": q, "k_proj_weight": k[:, :20], "v_proj_weight": v[:, :20]}
        short = x[..., :20]
        empty = torch.empty([0]) if has_empty else None
        parts = (x, short, short, E, H, empty, b, None, None, False, 0.0, w_out, b_out)
        options: Any = {"use_separate_proj_weight": True, "need_weights": False, **weights}
        return F.multi_head_attention_forward(*parts, **options)[0]

    check_swap(attend, *_tensors(S), expect=[NAME])


def _weights_read(x: Tensor, *tensors: Tensor) -> Any:
    return _forward(x, x, *tensors, need_weights=True)


def _weights_that_are_changed(x: Tensor, *tensors: Tensor) -> Any:
    out, weights = _forward(x, x, *tensors, need_weights=True)
    weights[:, 0].add_(1.0)
    return out


def _zero_key(x: Tensor, *tensors: Tensor) -> Tensor:
    return _forward(x, x, *tensors, add_zero_attn=True)[0]


def _added_key(x: Tensor, *tensors: Tensor) -> Tensor:
    more = x[:1, :1]
    return _forward(x, x, *tensors, bias_k=more, bias_v=more)[0]


def _no_batch(x: Tensor, *tensors: Tensor) -> Tensor:
    return _forward(x[:, 0], x[:, 0], *tensors)[0]


NEAR_MISSES = [_weights_read, _weights_that_are_changed, _zero_key, _added_key, _no_batch]


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
