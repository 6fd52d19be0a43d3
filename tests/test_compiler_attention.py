"""The patterns of attention: torch's function, and attention written out; every kind of mask."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_ops.compiler import masks
from tests.cases.attention_graphs import (
    BATCH,
    HEADS,
    LENGTH,
    REPEATS,
    blocks,
    compared,
    mask_as,
    qkv,
    slopes,
    told,
    told_by,
    upper_triangle_filled,
)
from tests.cases.compiler import check_swap

sdpa = F.scaled_dot_product_attention

# --- masks that the graph computes, all of which become numbers ------------------------


def lower_triangle(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril()


def upper_triangle_added(n: int, m: int) -> Tensor:
    return torch.full((n, m), -math.inf, dtype=torch.float64).triu(1)


def with_heads(n: int, m: int) -> Tensor:
    queries, keys = torch.arange(n), torch.arange(m) + 0
    seen = queries.new_ones((), dtype=torch.bool)
    seen = seen & (keys[None, None, None, :] <= queries[None, None, :, None]).to("cpu")
    return seen.expand(BATCH, -1, n, m)


def packed_of_one(n: int, m: int) -> Tensor:
    """transformers, where position_ids do not restart: what it computes of them is constant."""
    positions = torch.arange(n).unsqueeze(0).expand(BATCH, -1)
    restarts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    index = restarts.cumsum(-1)
    same = index[:, None, :, None] == index[:, None, None, :]
    return compared(n, m) & same


def where(n: int, m: int) -> Tensor:
    return torch.where(compared(n, m), 0.0, -math.inf).double()


def filled_in_place(n: int, m: int) -> Tensor:
    """As torch makes masks of bool ones."""
    hidden = ~compared(n, m)
    return torch.zeros_like(hidden, dtype=torch.float64).masked_fill_(hidden, -math.inf)


def upper_triangle_in_place(n: int, m: int) -> Tensor:
    return torch.zeros(n, m, dtype=torch.float64).fill_(-math.inf).triu_(1)


CAUSAL = [
    filled_in_place,
    upper_triangle_in_place,
    lower_triangle,
    upper_triangle_added,
    upper_triangle_filled,
    compared,
    with_heads,
    packed_of_one,
    where,
]


@pytest.mark.parametrize("mask", CAUSAL, ids=lambda f: f.__name__)
def test_causal_masks_become_an_argument(mask):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q.shape[2], k.shape[2]))

    found = check_swap(attend, *qkv(), expect=["attention"])
    assert told(found) == mask_as(causal=True)


def sliding(n: int, m: int) -> Tensor:
    distance = torch.arange(n)[:, None] - torch.arange(m)[None, :]
    return (distance >= 0) & (distance < 4)


def around(n: int, m: int) -> Tensor:
    return (torch.arange(n)[:, None] - torch.arange(m)[None, :]).abs() <= 2


def unequal_sides(n: int, m: int) -> Tensor:
    distance = torch.arange(n)[:, None] - torch.arange(m)[None, :]
    return (distance <= 5) & (distance >= -1)


def behind(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).triu(-3)


def everything(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool)


def nothing_added(n: int, m: int) -> Tensor:
    return torch.zeros(1, 1, n, m, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (sliding, mask_as(causal=True, window=(3, -1))),
        (around, mask_as(window=(2, 2))),
        (unequal_sides, mask_as(window=(5, 1))),
        (behind, mask_as(window=(3, -1))),
        (everything, mask_as()),
        (nothing_added, mask_as()),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_windows_and_masks_that_hide_nothing(mask, options):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q.shape[2], k.shape[2]))

    found = check_swap(attend, *qkv(), expect=["attention"])
    assert told(found) == options


@pytest.mark.parametrize("length_kv", [5, 9, 14])
@pytest.mark.parametrize("offset", [0, 2, 5])
def test_more_keys_than_queries_and_fewer(length_kv, offset):
    """Aligned at the first token, at the last one, or in between."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns = torch.arange(q.shape[2]) + offset, torch.arange(k.shape[2])
        return sdpa(q, k, v, attn_mask=columns <= rows[:, None])

    found = check_swap(attend, *qkv(length_kv), expect=["attention"])
    if offset == 0:
        assert told(found) == mask_as(causal=True)
    elif length_kv == LENGTH + offset:
        assert told(found) == mask_as(causal=True, bottom_right=True)
    assert not told(found)["mask"]


def test_random_masks_of_sizes_alone():
    """Whatever the sizes are, the numbers mean what the mask says, or it stays a tensor."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        n, m, left, right, shift = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((1, 8), (1, 8), (-1, 5), (-1, 5), (-3, 4))
        )

        def attend(q: Tensor, k: Tensor, v: Tensor, left=left, right=right, shift=shift) -> Tensor:
            distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - shift
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
            if left >= 0:
                seen = seen & (distance >= -left)
            if right >= 0:
                seen = seen & (distance <= right)
            return sdpa(q, k, v, attn_mask=seen)

        q, k, v = (torch.randn(1, 1, length, 8, dtype=torch.float64) for length in (n, m, m))
        distance = torch.arange(m) - torch.arange(n)[:, None] - shift
        seen = (distance >= -left if left >= 0 else distance == distance) & (
            distance <= right if right >= 0 else distance == distance
        )
        if bool(seen.any(-1).all()):  # of a row without keys, torch and ours differ
            check_swap(attend, q, k, v, expect=["attention"])


# --- masks of which a part is known, or nothing ----------------------------------------


def test_what_is_known_of_a_mask_is_taken_out_of_it():
    """Causal and padding: the triangle becomes an argument, the padding stays a row of keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        mask = compared(q.shape[2], k.shape[2])[None, None] & padding.bool()[:, None, None, :]
        return sdpa(q, k, v, attn_mask=mask)

    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    padding[1, 6:] = 0
    found = check_swap(attend, *qkv(), padding, expect=["attention"])
    assert found.report.swapped[0].note == "its mask became causal, a smaller tensor"
    assert told(found) == mask_as(causal=True, mask=True)
    assert found.ours[0].args[3].meta["example_value"].shape == (BATCH, 1, 1, LENGTH)


def _rows_of(lengths: Tensor, n: int) -> Tensor:
    return (torch.arange(n)[None, :] < lengths[:, None])[:, None, None, :]


def _columns_of(lengths: Tensor, n: int) -> Tensor:
    return torch.gt(lengths.view(-1, 1, 1, 1), torch.arange(n).view(1, 1, 1, -1))


def _expanded(lengths: Tensor, n: int) -> Tensor:
    seen = torch.arange(n, device="cpu").unsqueeze(0).lt(lengths.unsqueeze(1))
    return seen.view(-1, 1, 1, n).expand(-1, 1, n, n)


@pytest.mark.parametrize("mask", [_rows_of, _columns_of, _expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_that_is_computed_of_lengths(mask, causal):
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = mask(lengths, k.shape[2])
        if causal:
            seen = seen & compared(q.shape[2], k.shape[2])
        return sdpa(q, k, v, attn_mask=seen)

    # A length beyond the keys, too.
    found = check_swap(attend, *qkv(), torch.tensor([4, 12]), expect=["attention"])
    assert told(found) == mask_as(causal=causal)
    assert found.ours[0].kwargs["seq_lens_kv"] is not None


def test_expanded_padding_of_lengths_written_out():
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        seen = _columns_of(lengths, k.shape[2])
        return F.softmax(torch.where(seen, scores, -math.inf), -1) @ v

    check_swap(attend, *qkv(), torch.tensor([4, 9]), expect=["attention_by_matmul"])


def test_places_that_are_not_those_of_the_keys():
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(k.shape[2]).flip(0)[None, :] < lengths[:, None])[:, None, None, :]
        return sdpa(q, k, v, attn_mask=seen)

    found = check_swap(attend, *qkv(), torch.tensor([4, 9]), expect=["attention"])
    assert told(found) == mask_as(mask=True)


def test_lengths_of_heads_and_keys_in_another_order():
    def of_heads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(k.shape[2])[None, :] < lengths[:, None])[None, :, None, :]
        return sdpa(q, k, v, attn_mask=seen)

    def reordered(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(k.shape[2])[None, :] < lengths[:HEADS:2, None]
        order = torch.arange(k.shape[2] - 1, -1, -1)
        return sdpa(q, k, v, attn_mask=seen[:, order][:, None, None, :])

    for attend in (of_heads, reordered):
        found = check_swap(attend, *qkv(), torch.tensor([4, 9, 7, 3]), expect=["attention"])
        assert told(found) == mask_as(mask=True)


def test_lengths_of_queries_are_none_of_keys():
    """As many queries as keys, and the mask is of rows."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(q.shape[2])[None, :] < lengths[:, None])[:, None, :, None]
        return sdpa(q, k, v, attn_mask=seen | (torch.arange(k.shape[2]) == 0))

    found = check_swap(attend, *qkv(), torch.tensor([4, 9]), expect=["attention"])
    assert told(found) == mask_as(mask=True)


LOW = torch.finfo(torch.float64).min


def _where(seen: Tensor, bias: Tensor) -> Tensor:
    """T5 in transformers."""
    return torch.where(seen[None, None], bias, LOW)


def _added(seen: Tensor, bias: Tensor) -> Tensor:
    return bias + torch.where(seen, 0.0, -math.inf).double()[None, None]


def _added_first(seen: Tensor, bias: Tensor) -> Tensor:
    hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, LOW)
    return (hidden + bias).expand(BATCH, -1, -1, -1)


@pytest.mark.parametrize("mask", [_where, _added, _added_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_for_what_is_seen(mask, causal):
    """What it hides becomes an argument, and what it adds is not repeated for each sequence."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        n = q.shape[2]
        seen = compared(n, n) if causal else torch.ones(n, n, dtype=torch.bool)
        return sdpa(q, k, v, attn_mask=mask(seen, bias.permute(2, 0, 1)[None]))

    q, k, v = qkv()
    bias = torch.randn(LENGTH, LENGTH, q.shape[1], dtype=torch.float64)
    found = check_swap(attend, q, k, v, bias, expect=["attention"])
    (node,) = found.ours
    assert told(found) == mask_as(causal=causal, mask=True)
    assert node.args[3].meta["example_value"].shape == (1, q.shape[1], LENGTH, LENGTH)


@pytest.mark.gpu
def test_a_bias_for_what_is_seen_on_a_gpu():
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        seen = torch.ones(72, 72, dtype=torch.bool, device="cuda").tril()
        low = torch.finfo(torch.bfloat16).min
        return sdpa(q, k, v, attn_mask=torch.where(seen[None, None], bias, low))

    options = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (torch.randn(2, 4, 72, 64, **options) for _ in range(3))
    bias = torch.randn(1, 4, 72, 72, **options)
    found = check_swap(attend, q, k, v, bias, expect=["attention"], tolerance=6e-2)
    assert told(found) == mask_as(causal=True, mask=True)


def test_slopes_behind_a_triangle():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = upper_triangle_added(q.shape[2], q.shape[2])
        return sdpa(q, k, v, attn_mask=slopes(q, q) + hidden)

    found = check_swap(attend, *qkv(), expect=["attention"])
    assert told(found) == mask_as(causal=True, mask=True)


@pytest.mark.parametrize(
    "mask",
    [
        lambda seen, bias: torch.where(seen, bias, -1.0),
        lambda seen, bias: torch.where(seen, bias, bias * 2),
        lambda seen, bias: torch.add(torch.where(seen, 0.0, -math.inf).double(), bias, alpha=2),
        lambda seen, bias: torch.where(seen, 0.0, -math.inf).double() + bias.float(),
        lambda seen, bias: torch.where(seen, bias[0, 0, 0], LOW),
        lambda seen, bias: bias * seen,
    ],
)
def test_no_mask_of_a_bias(mask):
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(compared(q.shape[2], q.shape[2]), bias))

    bias = torch.randn(1, 1, LENGTH, LENGTH, dtype=torch.float64)
    found = check_swap(attend, *qkv(), bias, expect=["attention"])
    assert told(found) == mask_as(mask=True)


def _padding(q: Tensor, padding: Tensor) -> Tensor:
    return padding.bool()[:, None, None, :].expand(-1, 1, q.shape[2], -1)


def _bias(q: Tensor, padding: Tensor) -> Tensor:
    return (1.0 - padding.double())[:, None, None, :] * torch.finfo(torch.float64).min


def _diagonal_missing(q: Tensor, padding: Tensor) -> Tensor:
    return compared(q.shape[2], q.shape[2]) | torch.eye(q.shape[2], dtype=torch.bool).flip(0)


def _holes(q: Tensor, padding: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    return (columns == rows) | (columns == (rows - 3).clamp(min=0))


def _first_row_sees_all(q: Tensor, padding: Tensor) -> Tensor:
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    return (columns <= rows) | (rows == 0)


def _random(q: Tensor, padding: Tensor) -> Tensor:
    return (torch.rand(q.shape[2], q.shape[2]) >= 0).tril()


def _per_head(q: Tensor, padding: Tensor) -> Tensor:
    far = torch.arange(q.shape[1])[:, None, None] + 2
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return (distance >= 0) & (distance < far)


@pytest.mark.parametrize(
    "mask",
    [
        _padding,
        _bias,
        slopes,
        blocks,
        _diagonal_missing,
        _holes,
        _first_row_sees_all,
        _random,
        _per_head,
    ],
    ids=lambda f: f.__name__,
)
def test_other_masks_stay_tensors(mask):
    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q, padding))

    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    padding[0, 7:] = 0
    found = check_swap(attend, *qkv(), padding, expect=["attention"])
    assert told(found) == mask_as(mask=True)


def test_a_mask_that_is_changed_in_place_is_not_known():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[0] = True
        return sdpa(q, k, v, attn_mask=mask)

    assert told(check_swap(attend, *qkv(), expect=["attention"])) == mask_as(mask=True)

    def attend_by_a_copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[0].fill_(True)
        return sdpa(q, k, v, attn_mask=mask & mask.any(-1, keepdim=True))

    found = check_swap(attend_by_a_copy, *qkv(), expect=["attention"])
    assert told(found) == mask_as(mask=True)


def test_a_mask_that_is_read_before_it_is_filled_is_not_known():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        zeros = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
        mask = zeros.masked_fill_(~compared(LENGTH, LENGTH), -math.inf)
        return sdpa(q, k, v, attn_mask=mask), zeros + 1

    found = check_swap(attend, *qkv(), expect=["attention"])
    assert told(found) == mask_as(mask=True)


def test_keys_that_are_filled_part_by_part():
    """As in DeepSeek V3: all writes come before, and what is written after the match is refused."""

    def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.new_empty(k.shape)
        keys[..., :3] = k[..., :3]
        keys[..., 3:] = k[..., 3:].sin()
        return sdpa(q, keys, v)

    check_swap(filled, *qkv(), expect=["attention"])

    def written_after(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = k * 1.0
        found = sdpa(q, keys, v)
        keys[..., :3] = 0
        return found, keys

    found = check_swap(written_after, *qkv(), expect=[], gradients=False)
    assert "changed in place" in found.report.candidates[0].reason

    def written_within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = v * 1.0
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        values[..., :3] = 0
        return weights @ values

    found = check_swap(written_within, *qkv(), expect=[])
    assert "changed in place" in found.report.candidates[0].reason


def test_lengths_that_change_after_their_mask_was_made():
    """The operator would read them after the write, and the mask was made before it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths + 1
        mask = (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
        lengths.sub_(1)
        return sdpa(q, k, v, attn_mask=mask)

    inputs = *qkv(), torch.tensor([2, 4])
    found = check_swap(attend, *inputs, expect=[])
    assert "changed in place" in found.report.candidates[0].reason


def test_a_mask_of_dynamic_sizes_is_not_known():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=compared(q.shape[2], k.shape[2]))

    found = check_swap(attend, *qkv(), expect=["attention"], dynamic=True)
    assert told(found) == mask_as(mask=True)


def test_a_mask_of_several_layers_is_computed_once(monkeypatch):
    classify, calls = masks._classify, []

    def counted(mask: Tensor) -> Any:
        calls.append(tuple(mask.shape))
        return classify(mask)

    monkeypatch.setattr(masks, "_classify", counted)

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        partly = seen & padding[:, None, None, :]
        for mask in (seen, partly, seen, partly):
            q = sdpa(q, k, v, attn_mask=mask)
        return q

    padding = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    padding[0, 7:] = False
    found = check_swap(attend, *qkv(), padding, expect=["attention"] * 4)
    whole, rest = mask_as(causal=True), mask_as(causal=True, mask=True)
    assert [told_by(node) for node in found.ours] == [whole, rest, whole, rest]
    assert calls == [(LENGTH, LENGTH)] * 2


def test_what_is_known_of_a_mask_goes_with_its_graph():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    found = check_swap(attend, *qkv(), expect=["attention"])
    graph = weakref.ref(found.graphs[0].graph)
    assert any(mask.graph is graph() for mask in masks._known)
    del found
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


# --- heads -----------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_repeated_heads_are_grouped(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, repeat(k, 2), repeat(v, 2), is_causal=True)

    found = check_swap(attend, *qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].kwargs["enable_gqa"] is True
    assert found.ours[0].args[1].meta["example_value"].shape[1] == 2


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_repeated_heads_that_are_used_elsewhere_stay(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = repeat(k, 2)
        return sdpa(q, k, repeat(v, 2)), k * 2

    found = check_swap(attend, *qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].args[1].meta["example_value"].shape[1] == HEADS


def test_heads_in_another_order_are_no_groups():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    found = check_swap(attend, *qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].kwargs["enable_gqa"] is False


def test_torch_s_own_groups_and_scale():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, scale=0.3, enable_gqa=True)

    check_swap(attend, *qkv(heads_kv=2), expect=["attention"])
