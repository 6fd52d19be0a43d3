"""Attention by einsums: their dimensions in any order, and batches of several dimensions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases.attention_graphs import BATCH, HEADS, LENGTH, SIZE, qkv, slopes
from tests.cases.compiler import check_swap

EINSUMS = [
    ("bhid,bhjd->bhij", "bhij,bhjd->bhid"),
    ("bhjd,bhid->bhij", "bhij,bhjd->bihd"),
    ("bhid,bhjd->bhji", "bhij,bhjd->bhid"),  # keys times queries
    ("nlhc,nshc->nhls", "nhls,nshc->nlhc"),  # heads behind rows
    ("blhd,bshd->blhs", "blhs,bshd->blhd"),
    ("ibnd,jbnd->bnij", "bnij,jbnd->ibnd"),  # rows first, as in XLNet
    ("bct,bcs->bts", "bts,bcs->bct"),  # channels first, as in guided diffusion
    ("bid,bjd->bij", "xyz,xzw->xyw"),
    ("blhk,bpk->blhp", "blhp,bpk->blhk"),  # keys for all heads, as in MobileNetV4
]


@pytest.mark.parametrize(("scores", "results"), EINSUMS, ids=lambda text: text)
def test_einsums_in_any_order(scores, results):
    sizes = {"b": 2, "n": 3, "h": 4, "i": 5, "l": 5, "j": 7, "s": 7, "p": 7, "d": 16, "c": 16}
    sizes |= {"k": 16, "t": 6}
    one, other = (torch.randn([sizes[n] for n in x]).double() for x in _operands(scores))
    weights, value = _operands(results)
    sizes |= dict(zip(weights, [sizes[n] for n in scores.split(">")[1]], strict=True)) | {"w": 16}
    v = torch.randn([sizes[n] for n in value]).double()

    def attend(one: Tensor, other: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(results, F.softmax(torch.einsum(scores, one, other) * 0.3, dim=-1), v)

    check_swap(attend, one, other, v, expect=["attention_by_matmul"])


def _operands(equation: str) -> list[str]:
    return equation.split("->")[0].split(",")


def heads_behind_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("blhd,bshd->bhls", q, k) * 0.3
    return torch.einsum("bhls,bshd->blhd", F.softmax(scores, dim=-1), v)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 1, 3, 1, 5), (3, 64, 192, 2, 16), (0, 3, 5, 4, 8)], ids=str
)
def test_odd_sizes(sizes, dynamic):
    """One of everything, one key, lengths of 64 modulo 128, an empty batch."""
    batch, length, length_kv, heads, size = sizes
    lengths = (length, length_kv, length_kv)
    tensors = [torch.randn(batch, each, heads, size).double() for each in lengths]
    check_swap(heads_behind_rows, *tensors, expect=["attention_by_matmul"], dynamic=dynamic)


def test_scores_that_are_large():
    tensors = [torch.randn(2, length, 4, SIZE).double() * 12 for length in (5, 7, 7)]
    assert torch.einsum("blhd,bshd->bhls", *tensors[:2]).abs().max() > 120 / 0.3
    check_swap(heads_behind_rows, *tensors, expect=["attention_by_matmul"])


WINDOWS = [
    (1, HEADS, LENGTH, LENGTH),
    (LENGTH, LENGTH),
    (1, 1, HEADS, 1, LENGTH),
    (BATCH, 3, 1, LENGTH, LENGTH),
    (BATCH, 3, HEADS, LENGTH, LENGTH),
]


@pytest.mark.parametrize("sizes", WINDOWS)
@pytest.mark.parametrize("by_einsum", [True, False])
def test_a_batch_of_several_dimensions(by_einsum, sizes):
    """Windows of images, as in MaxViT."""
    q, k, v = (torch.randn(BATCH, 3, HEADS, LENGTH, SIZE).double() for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        if by_einsum:
            scores = torch.einsum("B G H I D, B G H J D -> B G H I J", q, k * 0.25)
            return torch.einsum("BGHIJ,BGHJD->BGHID", F.softmax(scores + bias, dim=-1), v)
        return F.softmax(q @ (k * 0.25).transpose(-2, -1) + bias, dim=-1) @ v

    bias = torch.randn(sizes).double()
    check_swap(attend, q, k, v, bias, expect=["attention_by_matmul"])


def test_einsums_of_repeated_heads():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("bhid,bhjd->bhij", q, k)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)

    found = check_swap(attend, *qkv(heads_kv=2), expect=["attention_by_matmul"])
    assert found.ours[0].kwargs["enable_gqa"] is True


@pytest.mark.parametrize("dims", [3, 4])
def test_channels_before_rows(dims):
    """As images have them: EfficientViT, SHViT, YOLO's attention."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q.transpose(-2, -1) @ k) * 0.25).softmax(dim=-1)
        return v @ weights.transpose(-2, -1)

    q, k, v = (x.transpose(-2, -1).contiguous() for x in qkv(5))
    v = v[..., :8, :]
    check_swap(
        attend,
        *((q, k, v) if dims == 4 else (q[0], k[0], v[0])),
        expect=["attention_by_matmul"],
    )


def _bias_of_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many samples as windows: a bias of each window could be one of each sample."""
    q, k, v = (torch.stack([x, x * 0.5]) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) + torch.linspace(0, 1, BATCH * LENGTH).view(
        BATCH, 1, 1, LENGTH
    )
    return F.softmax(scores, dim=-1) @ v


def _bias_of_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (torch.stack([x, x * 0.5]) for x in (q, k, v))
    bias = torch.linspace(0, 1, BATCH * LENGTH).view(BATCH, 1, 1, 1, LENGTH)
    return F.softmax(q @ k.transpose(-2, -1) + bias.to(q.dtype), dim=-1) @ v


def _einsums(scores: str, results: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(results, F.softmax(torch.einsum(scores, q, k), dim=-1), v)

    attend.__name__ = f"{scores} {results}"
    return attend


def _einsums_with_heads_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of other dimensions than attention's."""
    q, k, v = (x[:, :, :HEADS].transpose(1, 2) for x in (q, k, v))  # as many rows as heads
    scores = torch.einsum("blhd,bshd->blhs", q, k) + slopes(q, q)[:, None]
    return torch.einsum("blhs,bshd->blhd", scores.softmax(-1), v)


def _einsums_that_spread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k[:, :1])
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


@pytest.mark.parametrize(
    "near_miss",
    [
        _einsums("bhid,bhjd->bhij", "bhij,bhid->bhjd"),  # sums over the queries
        _einsums("bhid,bhjd->bhij", "bhij,bhjd->bhi"),  # and over channels
        _einsums("bhid,bhjd->bhij", "bhij,bhjd->bjd"),
        _einsums("bhid,bgjd->bhij", "bhij,bhjd->bhid"),
        _einsums("bhid,bhje->bhij", "bhij,bhjd->bhid"),
        _einsums("bhid,bhjd->bhij", "bhij,ghjd->bhid"),
        _bias_of_windows,
        _bias_of_samples,
        _einsums_with_heads_behind,
        _einsums_that_spread,
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_attention(near_miss):
    check_swap(near_miss, *qkv(), expect=[])
