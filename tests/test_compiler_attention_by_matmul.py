"""The pattern of attention that is written out: products, scale, mask, softmax, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_ops.ops.arguments import bind
from tests.cases.attention_graphs import (
    BATCH,
    HEADS,
    LENGTH,
    REPEATS,
    blocks,
    compared,
    mask_as,
    qkv,
    repeat_kv,
    slopes,
    told,
    upper_triangle_filled,
)
from tests.cases.compiler import Rewritten, check_swap
from tests.conftest import DEVICES


def eager_of_transformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def divided(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return torch.softmax(scores, -1) @ v


def scaled_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q * 0.25) @ k.transpose(-2, -1) + mask).softmax(dim=-1) @ v


def keys_permuted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)).mul(0.25)
    return F.softmax(mask + scores, -1).matmul(v)


def added_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += mask
    return torch.matmul(F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.0), v)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * 0.25
    scores = scores.masked_fill(mask < -1, float("-inf"))
    return F.softmax(scores, dim=-1) @ v


def filled_low(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / 4.0
    return F.softmax(torch.masked_fill(scores, mask < -1, -1e9), dim=3) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / 4.0
    return F.softmax(torch.where(mask > -1, scores, torch.finfo(scores.dtype).min), dim=-1) @ v


def unmasked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    del mask
    return F.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, dim=-1) @ v


def known_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.25
    scores = scores.masked_fill(~compared(q.shape[-2], k.shape[-2]), -math.inf)
    return F.softmax(scores, dim=-1) @ v


def known_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * 0.25 + upper_triangle_filled(q.shape[-2], k.shape[-2])
    return F.softmax(scores, dim=-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.25
    return torch.einsum("b h i j, b h j d -> b h i d", F.softmax(scores + mask, dim=-1), v)


def by_einsum_and_matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...id,...jd->...ij", [q, k]) / 4.0
    return (scores + mask).softmax(-1) @ v


def by_matmul_and_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = F.softmax(q @ k.transpose(-2, -1) * 0.25 + mask, dim=-1)
    return torch.einsum("bhkc,bhqk->bqhc", v, weights)


def masked_and_divided(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As in CodeGen."""
    return F.softmax((q @ k.transpose(-2, -1) + mask) / 4.0, dim=-1) @ v


WRITTEN_OUT: list[Callable[..., Tensor]] = [
    eager_of_transformers,
    divided,
    scaled_first,
    keys_permuted,
    filled,
    filled_low,
    chosen,
    unmasked,
    known_mask,
    known_bias,
    by_einsum,
    by_einsum_and_matmul,
    by_matmul_and_einsum,
    masked_and_divided,
]


def _mask() -> Tensor:
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.float64)
    padding[0, ..., 6:] = torch.finfo(torch.float64).min
    return padding


@pytest.mark.parametrize("attend", WRITTEN_OUT, ids=lambda f: f.__name__)
def test_attention_written_out(attend):
    found = check_swap(attend, *qkv(), _mask(), expect=["attention_by_matmul"])
    known = attend in (known_mask, known_bias)
    assert told(found) == mask_as(causal=known, mask=not known and attend is not unmasked)


def test_attention_in_float32_with_a_sum_in_place():
    tensors = [x.float() for x in (*qkv(), _mask().clamp_min(torch.finfo(torch.float32).min))]
    check_swap(added_in_place, *tensors, expect=["attention_by_matmul"], tolerance=1e-4)


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_attention_written_out_with_groups(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return eager_of_transformers(q, repeat(k, 2), repeat(v, 2), mask)

    found = check_swap(attend, *qkv(heads_kv=2), _mask(), expect=["attention_by_matmul"])
    assert found.ours[0].kwargs["enable_gqa"] is True


def test_three_dimensions():
    """Batch and heads are one, as in BART."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(F.softmax(torch.bmm(q * 0.25, k.transpose(1, 2)), dim=-1), v)

    check_swap(attend, *(x.flatten(0, 1) for x in qkv()), expect=["attention_by_matmul"])


@pytest.mark.parametrize("beta", [0, 1])
def test_a_product_that_is_scaled_by_what_adds_to_it(beta):
    """``torch.baddbmm``, as in diffusers."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.baddbmm(bias, q, k.transpose(-1, -2), beta=beta, alpha=0.25)
        return torch.bmm(scores.softmax(dim=-1), v)

    q, k, v = (x.flatten(0, 1) for x in qkv())
    bias = torch.randn(BATCH * HEADS, LENGTH, LENGTH, dtype=torch.float64)
    found = check_swap(attend, q, k, v, bias, expect=["attention_by_matmul"], gradients=beta == 1)
    assert told(found) == mask_as(mask=beta == 1)


def test_products_of_16_bit_numbers_in_float32():
    """Attention multiplies 16-bit numbers so by itself: the conversions go."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) / 4.0
        return F.softmax(scores, dim=-1).to(v.dtype) @ v

    tensors = [x.bfloat16() for x in qkv()]
    found = check_swap(attend, *tensors, expect=["attention_by_matmul"], tolerance=0.05)
    assert [x.meta["example_value"].dtype for x in found.ours[0].args[:3]] == [torch.bfloat16] * 3

    def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v.float())

    found = check_swap(in_float32, *tensors, expect=["attention_by_matmul"], tolerance=0.05)
    assert found.ours[0].args[0].meta["example_value"].dtype == torch.float32


def of_gpt_oss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * 0.25 + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    logits = torch.cat([scores, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
    weights = F.dropout(weights, p=0.0, training=True).to(v.dtype)
    return torch.matmul(weights, repeat_kv(v, 2)).transpose(1, 2).contiguous()


def with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    q = q[:, :2]
    scores = torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(mask < -1, -math.inf)
    column = sinks[:2].view(1, 2, 1, 1).expand(BATCH, 2, LENGTH, 1)
    weights = torch.softmax(torch.cat((scores, column), 3).float(), -1).to(q.dtype)
    return weights[:, :, :, :-1] @ v


@pytest.mark.parametrize("attend", [of_gpt_oss, with_sinks], ids=lambda f: f.__name__)
def test_attention_with_sinks(attend):
    sinks = torch.randn(HEADS, dtype=torch.float64)
    tensors = (*qkv(heads_kv=2), _mask(), sinks)
    found = check_swap(attend, *tensors, expect=["attention_by_matmul"], tolerance=1e-5)
    call = bind(torch.ops.cudnn_ops.sdpa.default, found.ours[0].args, found.ours[0].kwargs)
    assert call.sinks.meta["example_value"].dim() == 1
    assert call.enable_gqa is (attend is of_gpt_oss)


def heads_behind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bihj", q, repeat_kv(k, 2)) * 0.25
    return torch.einsum("bihj,bhjd->bihd", scores.softmax(dim=-1), repeat_kv(v, 2))


def channels_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    q, k, v = (x.transpose(-2, -1) for x in (q, repeat_kv(k, 2), repeat_kv(v, 2)))
    weights = ((q.transpose(-2, -1) @ k) * 0.25 + mask).softmax(dim=-1)
    return v @ weights.transpose(-2, -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "attend", [of_gpt_oss, heads_behind, channels_first], ids=lambda f: f.__name__
)
def test_in_16_bits(attend, device):
    """As right as what it replaces, with its gradients."""
    heads = (HEADS, HEADS // 2, HEADS // 2)
    exact = [torch.randn(BATCH, each, 192, 64).bfloat16().double() for each in heads]
    mask = torch.zeros(BATCH, 1, 1, 192).double()
    mask[0, ..., 130:] = torch.finfo(torch.bfloat16).min
    exact = [x.to(device) for x in (*exact, mask, torch.randn(HEADS).bfloat16().double())]
    narrow = [x.bfloat16() for x in exact]
    rewritten = Rewritten(attend)
    outs = [_with_gradients(function, x) for function, x in ((attend, exact), (attend, narrow))]
    ours = _with_gradients(rewritten, narrow)
    assert rewritten.swapped == ["attention_by_matmul"]
    for reference, stock, one in zip(*outs, ours, strict=True):
        error, torchs = (_error(x, reference) for x in (one, stock))
        assert error < 2 * torchs + 1e-3


def _with_gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(i != 3) for i, x in enumerate(tensors)]
    out = function(*leaves)
    torch.manual_seed(0)
    grad = torch.randn(out.shape, dtype=torch.float64).bfloat16()
    read = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(out, read, grad.to(out), allow_unused=True)
    return [out, *(x for x in grads if x is not None)]


@torch.no_grad()
def _error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


def test_scores_from_which_the_largest_is_subtracted():
    """The softmax does that by itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        return F.softmax(scores - scores.amax(dim=-1, keepdim=True), dim=-1) @ v

    check_swap(attend, *qkv(), expect=["attention_by_matmul"])


def test_a_learned_bias_gets_its_gradient():
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1) + bias, dim=-1) @ v

    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    check_swap(attend, *qkv(), bias, expect=["attention_by_matmul"])


@pytest.mark.parametrize("sizes", [(HEADS, 1, 1), (1, HEADS, 1, 1), (BATCH, 1, LENGTH, 1), (1, 1)])
def test_factors_of_heads_or_queries(sizes):
    """As in Swin V2, whose scale is learned; in another precision than the product's, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return F.softmax(scores * factors.exp() + bias.unsqueeze(0), dim=-1) @ v

    factors = torch.randn(sizes, dtype=torch.float64)
    bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    check_swap(attend, *qkv(), factors, bias, expect=["attention_by_matmul"])
    narrow = [x.float() for x in qkv()]
    check_swap(
        lambda q, k, v, factors: (
            F.softmax((q @ k.transpose(-2, -1) * factors.to(q.dtype)), dim=-1) @ v
        ),
        *(*narrow, factors),
        expect=["attention_by_matmul"],
        tolerance=1e-4,
    )


def test_dropout_while_training():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(F.softmax(q @ k.transpose(-2, -1), -1), 0.25, training=True) @ v

    rewritten = Rewritten(attend)
    rewritten(*qkv())
    assert rewritten.swapped == ["attention_by_matmul"]
    assert rewritten.ours[0].args[4] == 0.25


def _weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = F.softmax(q @ k.transpose(-2, -1), -1)
    return weights @ v, weights


def _other_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1), -2) @ v


def _sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.transpose(-2, -1)) @ v


def _low_is_not_low(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).masked_fill(blocks(q, q), -3.0)
    return F.softmax(scores, -1) @ v


def _masked_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1), -1).masked_fill(blocks(q, q), 0.0) @ v


def _doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(q @ k.transpose(-2, -1), -1) * 2) @ v


def _factors_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * k.sum(-1).unsqueeze(-2), -1) @ v


def _factors_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * slopes(q, q), -1) @ v


def _factors_of_new_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    factors = q.sum((1, 2, 3), keepdim=True)
    return F.softmax((q[:1] @ k[:1].transpose(-2, -1)) * factors, -1) @ v


def _added_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.add(q @ k.transpose(-2, -1), slopes(q, q), alpha=2)
    return F.softmax(scores, -1) @ v


def _values_times_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.transpose(-2, -1) @ F.softmax(q @ k.transpose(-2, -1), dim=-1)


def _weights_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1), dim=-1).transpose(-2, -1) @ v


def _sinks(
    weights: Callable[[Tensor], Tensor], sizes: tuple[int, ...] = (1, HEADS, 1, 1)
) -> Callable[..., Tensor]:
    sinks = torch.randn(max(sizes), dtype=torch.float64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q[:, :, :HEADS]  # as many as heads
        v = v[:, :, : weights(torch.empty(1, 1, 1, LENGTH + 1)).shape[-1]]
        column = sinks.reshape(*sizes).expand(BATCH, HEADS, HEADS, 1)
        return weights(F.softmax(torch.cat([q @ k.transpose(-2, -1), column], dim=-1), -1)) @ v

    return attend


def _largest_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1)
    return F.softmax(scores - scores.amax(dim=-2, keepdim=True), dim=-1) @ v


@pytest.mark.parametrize(
    "near_miss",
    [
        _values_times_weights,
        _weights_turned,
        _sinks(lambda weights: weights[..., :-1], (1, 1, HEADS, 1)),  # for each query
        _sinks(lambda weights: weights[..., 1:]),
        _sinks(lambda weights: weights[:, :, :, 1:-1]),
        _largest_of_queries,
        _weights_returned,
        _other_axis,
        _sigmoid,
        _low_is_not_low,
        _masked_behind,
        _doubled,
        _added_twice,
        _factors_of_keys,
        _factors_of_scores,
        _factors_of_new_samples,
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_attention(near_miss):
    check_swap(near_miss, *qkv(), expect=[])


def test_the_keys_of_another_attention():
    """The value is no value but a square of the right sizes: attention nonetheless."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1), -1) @ (v @ v.transpose(-2, -1))

    check_swap(attend, *qkv(), expect=["attention_by_matmul"])
