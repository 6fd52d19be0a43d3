"""The patterns of attention: torch's function, and attention written out; every kind of mask."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from cudnn_ops.compiler import masks
from cudnn_ops.ops.arguments import bind
from tests.cases.compiler import Rewritten, check_swap

sdpa = F.scaled_dot_product_attention
BATCH, HEADS, LENGTH, SIZE = 2, 4, 9, 16


def _qkv(length_kv: int = LENGTH, heads_kv: int = HEADS) -> list[Tensor]:
    return [
        torch.randn(BATCH, heads, length, SIZE, dtype=torch.float64)
        for heads, length in ((HEADS, LENGTH), (heads_kv, length_kv), (heads_kv, length_kv))
    ]


def _options(found: Rewritten) -> dict[str, Any]:
    """What the one call of our operator says about its mask."""
    (node,) = found.ours
    return _options_of(node)


def _options_of(node: fx.Node) -> dict[str, Any]:
    call = bind(torch.ops.cudnn_ops.sdpa.default, node.args, node.kwargs)
    return {
        "causal": call.is_causal,
        "window": tuple(call.window_size),
        "bottom_right": call.bottom_right,
        "mask": call.attn_mask is not None,
    }


def _expect(
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    bottom_right: bool = False,
    mask: bool = False,
) -> dict[str, Any]:
    return {"causal": causal, "window": window, "bottom_right": bottom_right, "mask": mask}


# --- masks that the graph computes, all of which become numbers ------------------------


def lower_triangle(n: int, m: int) -> Tensor:
    return torch.ones(n, m, dtype=torch.bool).tril()


def upper_triangle_added(n: int, m: int) -> Tensor:
    return torch.full((n, m), -math.inf, dtype=torch.float64).triu(1)


def upper_triangle_filled(n: int, m: int) -> Tensor:
    hidden = torch.triu(torch.ones(n, m), diagonal=1).bool()
    return torch.zeros(n, m, dtype=torch.float64).masked_fill(
        hidden, torch.finfo(torch.float64).min
    )


def compared(n: int, m: int) -> Tensor:
    return torch.arange(m)[None, :] <= torch.arange(n)[:, None]


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


CAUSAL = [
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

    found = check_swap(attend, *_qkv(), expect=["attention"])
    assert _options(found) == _expect(causal=True)


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
        (sliding, _expect(causal=True, window=(3, -1))),
        (around, _expect(window=(2, 2))),
        (unequal_sides, _expect(window=(5, 1))),
        (behind, _expect(window=(3, -1))),
        (everything, _expect()),
        (nothing_added, _expect()),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_windows_and_masks_that_hide_nothing(mask, options):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=mask(q.shape[2], k.shape[2]))

    found = check_swap(attend, *_qkv(), expect=["attention"])
    assert _options(found) == options


@pytest.mark.parametrize("length_kv", [5, 9, 14])
@pytest.mark.parametrize("offset", [0, 2, 5])
def test_more_keys_than_queries_and_fewer(length_kv, offset):
    """Aligned at the first token, at the last one, or in between."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, columns = torch.arange(q.shape[2]) + offset, torch.arange(k.shape[2])
        return sdpa(q, k, v, attn_mask=columns <= rows[:, None])

    found = check_swap(attend, *_qkv(length_kv), expect=["attention"])
    if offset == 0:
        assert _options(found) == _expect(causal=True)
    elif length_kv == LENGTH + offset:
        assert _options(found) == _expect(causal=True, bottom_right=True)
    assert not _options(found)["mask"]


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
    found = check_swap(attend, *_qkv(), padding, expect=["attention"])
    assert found.report.swapped[0].note == "its mask became causal, a smaller tensor"
    assert _options(found) == _expect(causal=True, mask=True)
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
    found = check_swap(attend, *_qkv(), torch.tensor([4, 12]), expect=["attention"])
    assert _options(found) == _expect(causal=causal)
    assert found.ours[0].kwargs["seq_lens_kv"] is not None


def test_expanded_padding_of_lengths_written_out():
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        seen = _columns_of(lengths, k.shape[2])
        return F.softmax(torch.where(seen, scores, -math.inf), -1) @ v

    check_swap(attend, *_qkv(), torch.tensor([4, 9]), expect=["attention_by_matmul"])


def test_places_that_are_not_those_of_the_keys():
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(k.shape[2]).flip(0)[None, :] < lengths[:, None])[:, None, None, :]
        return sdpa(q, k, v, attn_mask=seen)

    found = check_swap(attend, *_qkv(), torch.tensor([4, 9]), expect=["attention"])
    assert _options(found) == _expect(mask=True)


def test_lengths_of_heads_and_keys_in_another_order():
    def of_heads(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(k.shape[2])[None, :] < lengths[:, None])[None, :, None, :]
        return sdpa(q, k, v, attn_mask=seen)

    def reordered(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(k.shape[2])[None, :] < lengths[:HEADS:2, None]
        order = torch.arange(k.shape[2] - 1, -1, -1)
        return sdpa(q, k, v, attn_mask=seen[:, order][:, None, None, :])

    for attend in (of_heads, reordered):
        found = check_swap(attend, *_qkv(), torch.tensor([4, 9, 7, 3]), expect=["attention"])
        assert _options(found) == _expect(mask=True)


def test_lengths_of_queries_are_none_of_keys():
    """As many queries as keys, and the mask is of rows."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        seen = (torch.arange(q.shape[2])[None, :] < lengths[:, None])[:, None, :, None]
        return sdpa(q, k, v, attn_mask=seen | (torch.arange(k.shape[2]) == 0))

    found = check_swap(attend, *_qkv(), torch.tensor([4, 9]), expect=["attention"])
    assert _options(found) == _expect(mask=True)


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

    q, k, v = _qkv()
    bias = torch.randn(LENGTH, LENGTH, q.shape[1], dtype=torch.float64)
    found = check_swap(attend, q, k, v, bias, expect=["attention"])
    (node,) = found.ours
    assert _options(found) == _expect(causal=causal, mask=True)
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
    assert _options(found) == _expect(causal=True, mask=True)


def test_slopes_behind_a_triangle():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = upper_triangle_added(q.shape[2], q.shape[2])
        return sdpa(q, k, v, attn_mask=_slopes(q, q) + hidden)

    found = check_swap(attend, *_qkv(), expect=["attention"])
    assert _options(found) == _expect(causal=True, mask=True)


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
    found = check_swap(attend, *_qkv(), bias, expect=["attention"])
    assert _options(found) == _expect(mask=True)


def _padding(q: Tensor, padding: Tensor) -> Tensor:
    return padding.bool()[:, None, None, :].expand(-1, 1, q.shape[2], -1)


def _bias(q: Tensor, padding: Tensor) -> Tensor:
    return (1.0 - padding.double())[:, None, None, :] * torch.finfo(torch.float64).min


def _slopes(q: Tensor, padding: Tensor) -> Tensor:
    return -0.5 * (torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs().double()


def _blocks(q: Tensor, padding: Tensor) -> Tensor:
    block = torch.arange(q.shape[2]) // 3
    return block[:, None] == block


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
        _slopes,
        _blocks,
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
    found = check_swap(attend, *_qkv(), padding, expect=["attention"])
    assert _options(found) == _expect(mask=True)


def test_a_mask_that_is_changed_in_place_is_not_known():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[0] = True
        return sdpa(q, k, v, attn_mask=mask)

    assert _options(check_swap(attend, *_qkv(), expect=["attention"])) == _expect(mask=True)

    def attend_by_a_copy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[0].fill_(True)
        return sdpa(q, k, v, attn_mask=mask & mask.any(-1, keepdim=True))

    found = check_swap(attend_by_a_copy, *_qkv(), expect=["attention"])
    assert _options(found) == _expect(mask=True)


def test_keys_that_are_filled_part_by_part():
    """As in DeepSeek V3: all writes come before, and what is written after the match is refused."""

    def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.new_empty(k.shape)
        keys[..., :3] = k[..., :3]
        keys[..., 3:] = k[..., 3:].sin()
        return sdpa(q, keys, v)

    check_swap(filled, *_qkv(), expect=["attention"])

    def written_after(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = k * 1.0
        found = sdpa(q, keys, v)
        keys[..., :3] = 0
        return found, keys

    found = check_swap(written_after, *_qkv(), expect=[], gradients=False)
    assert "changed in place" in found.report.candidates[0].reason

    def written_within(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = v * 1.0
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        values[..., :3] = 0
        return weights @ values

    found = check_swap(written_within, *_qkv(), expect=[])
    assert "changed in place" in found.report.candidates[0].reason


def test_lengths_that_change_after_their_mask_was_made():
    """The operator would read them after the write, and the mask was made before it."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths + 1
        mask = (torch.arange(k.shape[2]) < lengths[:, None])[:, None, None]
        lengths.sub_(1)
        return sdpa(q, k, v, attn_mask=mask)

    inputs = *_qkv(), torch.tensor([2, 4])
    found = check_swap(attend, *inputs, expect=[])
    assert "changed in place" in found.report.candidates[0].reason


def test_a_mask_of_dynamic_sizes_is_not_known():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=compared(q.shape[2], k.shape[2]))

    found = check_swap(attend, *_qkv(), expect=["attention"], dynamic=True)
    assert _options(found) == _expect(mask=True)


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
    found = check_swap(attend, *_qkv(), padding, expect=["attention"] * 4)
    whole, rest = _expect(causal=True), _expect(causal=True, mask=True)
    assert [_options_of(node) for node in found.ours] == [whole, rest, whole, rest]
    assert calls == [(LENGTH, LENGTH)] * 2


def test_what_is_known_of_a_mask_goes_with_its_graph():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    found = check_swap(attend, *_qkv(), expect=["attention"])
    graph = weakref.ref(found.graphs[0].graph)
    assert any(mask.graph is graph() for mask in masks._known)
    del found
    torch._dynamo.reset()
    gc.collect()
    assert graph() is None


# --- heads -----------------------------------------------------------------------------


def repeat_kv(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, n, length, size)
    return x.reshape(batch, heads * n, length, size)


def unsqueezed(x: Tensor, n: int) -> Tensor:
    batch, heads, length, size = x.shape
    return x.unsqueeze(2).expand(-1, -1, n, -1, -1).reshape(batch, heads * n, length, size)


def interleaved(x: Tensor, n: int) -> Tensor:
    return torch.repeat_interleave(x, n, dim=1)


def interleaved_method(x: Tensor, n: int) -> Tensor:
    return x.repeat_interleave(n, -3)


REPEATS = [repeat_kv, unsqueezed, interleaved, interleaved_method]


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_repeated_heads_are_grouped(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, repeat(k, 2), repeat(v, 2), is_causal=True)

    found = check_swap(attend, *_qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].kwargs["enable_gqa"] is True
    assert found.ours[0].args[1].meta["example_value"].shape[1] == 2


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_repeated_heads_that_are_used_elsewhere_stay(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k = repeat(k, 2)
        return sdpa(q, k, repeat(v, 2)), k * 2

    found = check_swap(attend, *_qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].args[1].meta["example_value"].shape[1] == HEADS


def test_heads_in_another_order_are_no_groups():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    found = check_swap(attend, *_qkv(heads_kv=2), expect=["attention"])
    assert found.ours[0].kwargs["enable_gqa"] is False


def test_torch_s_own_groups_and_scale():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, scale=0.3, enable_gqa=True)

    check_swap(attend, *_qkv(heads_kv=2), expect=["attention"])


# --- attention written out -------------------------------------------------------------


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
]


def _mask() -> Tensor:
    padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.float64)
    padding[0, ..., 6:] = torch.finfo(torch.float64).min
    return padding


@pytest.mark.parametrize("attend", WRITTEN_OUT, ids=lambda f: f.__name__)
def test_attention_written_out(attend):
    found = check_swap(attend, *_qkv(), _mask(), expect=["attention_by_matmul"])
    known = attend in (known_mask, known_bias)
    assert _options(found) == _expect(causal=known, mask=not known and attend is not unmasked)


def test_attention_in_float32_with_a_sum_in_place():
    tensors = [x.float() for x in (*_qkv(), _mask().clamp_min(torch.finfo(torch.float32).min))]
    check_swap(added_in_place, *tensors, expect=["attention_by_matmul"], tolerance=1e-4)


@pytest.mark.parametrize("repeat", REPEATS, ids=lambda f: f.__name__)
def test_attention_written_out_with_groups(repeat):
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return eager_of_transformers(q, repeat(k, 2), repeat(v, 2), mask)

    found = check_swap(attend, *_qkv(heads_kv=2), _mask(), expect=["attention_by_matmul"])
    assert found.ours[0].kwargs["enable_gqa"] is True


def test_three_dimensions():
    """Batch and heads are one, as in BART."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(F.softmax(torch.bmm(q * 0.25, k.transpose(1, 2)), dim=-1), v)

    check_swap(attend, *(x.flatten(0, 1) for x in _qkv()), expect=["attention_by_matmul"])


def test_a_learned_bias_gets_its_gradient():
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1) + bias, dim=-1) @ v

    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    check_swap(attend, *_qkv(), bias, expect=["attention_by_matmul"])


@pytest.mark.parametrize("sizes", [(HEADS, 1, 1), (1, HEADS, 1, 1), (BATCH, 1, LENGTH, 1), (1, 1)])
def test_factors_of_heads_or_queries(sizes):
    """As in Swin V2, whose scale is learned; in another precision than the product's, too."""

    def attend(q: Tensor, k: Tensor, v: Tensor, factors: Tensor, bias: Tensor) -> Tensor:
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        return F.softmax(scores * factors.exp() + bias.unsqueeze(0), dim=-1) @ v

    factors = torch.randn(sizes, dtype=torch.float64)
    bias = torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    check_swap(attend, *_qkv(), factors, bias, expect=["attention_by_matmul"])
    narrow = [x.float() for x in _qkv()]
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
    rewritten(*_qkv())
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
    scores = (q @ k.transpose(-2, -1)).masked_fill(_blocks(q, q), -3.0)
    return F.softmax(scores, -1) @ v


def _masked_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-2, -1), -1).masked_fill(_blocks(q, q), 0.0) @ v


def _doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (F.softmax(q @ k.transpose(-2, -1), -1) * 2) @ v


def _factors_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * k.sum(-1).unsqueeze(-2), -1) @ v


def _factors_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax((q @ k.transpose(-2, -1)) * _slopes(q, q), -1) @ v


def _factors_of_new_samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    factors = q.sum((1, 2, 3), keepdim=True)
    return F.softmax((q[:1] @ k[:1].transpose(-2, -1)) * factors, -1) @ v


def _added_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.add(q @ k.transpose(-2, -1), _slopes(q, q), alpha=2)
    return F.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    "near_miss",
    [
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
    check_swap(near_miss, *_qkv(), expect=[])


def test_the_keys_of_another_attention():
    """The value is no value but a square of the right sizes: attention nonetheless."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.transpose(-2, -1), -1) @ (v @ v.transpose(-2, -1))

    check_swap(attend, *_qkv(), expect=["attention_by_matmul"])
