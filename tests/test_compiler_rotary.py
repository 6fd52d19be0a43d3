"""The pattern of rotary embedding: every spelling that models have, and near-misses."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cases.compiler import Rewritten, check_swap
from tests.cases.rotary_spellings import (
    ROTATIONS,
    SPELLINGS,
    B,
    D,
    H,
    S,
    cohere,
    ernie,
    flash_attention,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    llama_of_meta,
    modernbert,
    nanochat,
    olmo,
    rotate_half,
    tokens_first,
)


def _check(rotary: Callable[..., Tensor], **kwargs) -> Rewritten:
    """With angles that need no gradient."""
    dtype = kwargs.pop("dtype", torch.float64)
    sizes = kwargs.pop("sizes", (B, H, S, D))
    angles = torch.randn(sizes[0], sizes[2], sizes[3], dtype=dtype)
    cos, sin = angles.cos(), angles.sin()

    def of_x(x: Tensor) -> Tensor:
        return rotary(x, cos, sin)

    return check_swap(of_x, torch.randn(sizes, dtype=dtype), **{"expect": ["rotary"], **kwargs})


@pytest.mark.parametrize("rotary", SPELLINGS, ids=lambda f: f.__name__)
def test_rotary(rotary):
    _check(rotary)


@pytest.mark.parametrize("rotate", ROTATIONS, ids=lambda f: f.__name__)
def test_halves(rotate):
    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos.unsqueeze(1) + rotate(x) * sin.unsqueeze(1)

    found = _check(rotary)
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.rotary_embedding.default"]


@pytest.mark.parametrize("rotary", [modernbert, ernie, olmo], ids=lambda f: f.__name__)
def test_computed_in_another_precision(rotary):
    found = _check(rotary, dtype=torch.float32)
    assert found.ours[0].meta["example_value"].dtype == torch.float32
    assert not any(node.target in ("double", "type_as") for node in found.graphs[0].graph.nodes)


def test_refusals_are_not_logged(caplog):
    """The operator refuses angles in another precision than its input's."""

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide, again = x.double(), x.double()
        return (wide * cos.double()[:, None] + rotate_half(again) * sin.double()[:, None]).float()

    with caplog.at_level("WARNING", logger="torch._subclasses.fake_tensor"):
        found = _check(rotary, dtype=torch.float32, expect=[])
    assert "must be of the input's dtype" in found.report.candidates[0].reason
    assert caplog.records == []


def test_queries_and_keys_share_their_angles():
    """In float32, as some models compute them: the casts of the angles are used twice."""

    def both(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
        query, key = x.float(), x[:, :1].float()
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        return query.to(x.dtype), key.to(x.dtype)

    alone = {"swap": ["rotary"], "dtype": torch.bfloat16, "tolerance": 3e-2}
    found = _check(both, expect=["rotary"] * 2, **alone)
    assert len(found.ours) == 2


@pytest.mark.parametrize("rotary", [gpt_neox, flash_attention, gptj], ids=lambda f: f.__name__)
def test_the_rest_of_each_head_is_copied_by_the_operator(rotary):
    found = _check(rotary, dynamic=rotary is gpt_neox)
    (graph,) = found.graphs
    joined = [node for node in graph.graph.nodes if node.target is torch.cat]
    assert all(node.meta["example_value"].shape[-1] < D for node in joined)
    assert found.ours[0].kwargs["rotary_dim"] in (4, 6)


def _rest_of_another(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([llama(x[..., :6], cos[..., :6], sin[..., :6]), x.sin()[..., 6:]], -1)


def _rest_in_front(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([x[..., 6:], llama(x[..., :6], cos[..., :6], sin[..., :6])], -1)


def _end_turns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([llama(x[..., 2:], cos[..., 2:], sin[..., 2:]), x[..., :2]], -1)


def _rest_overlaps(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([llama(x[..., :6], cos[..., :6], sin[..., :6]), x[..., 4:6]], -1)


def _second_to_seventh(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([llama(x[..., 1:7], cos[..., :6], sin[..., :6]), x[..., 6:]], -1)


def _rest_has_a_gap(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([llama(x[..., :4], cos[..., :4], sin[..., :4]), x[..., 6:]], -1)


def _rest_is_used_elsewhere(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rest = x[..., 6:]
    return torch.cat([llama(x[..., :6], cos[..., :6], sin[..., :6]), rest], -1) + rest.sum()


RESTS = [
    *(_rest_of_another, _rest_in_front, _end_turns, _rest_overlaps, _rest_has_a_gap),
    *(_second_to_seventh, _rest_is_used_elsewhere),
]


@pytest.mark.parametrize("rotary", RESTS, ids=lambda f: f.__name__)
def test_what_is_no_rest_stays_outside(rotary):
    found = _check(rotary)
    assert "rotary_dim" not in found.ours[0].kwargs


def test_norm_behind_it():
    """Of the sum, which is rotary's and not the norm's."""

    def norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(nanochat(x, cos, sin), (D,), eps=1e-6)

    found = _check(norm, expect=["rotary", "rms_norm"])
    names = [str(node.target) for node in found.ours]
    assert names == ["cudnn_ops.rotary_embedding.default", "cudnn_ops.rms_norm.default"]


def test_norm_before_it():
    def norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.double()
        x = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return llama(x, cos, sin)

    for dtype in (torch.float64, torch.float32):
        _check(norm, expect=["rotary", "rms_norm"], dtype=dtype)


def test_casts_on_both_sides_of_a_change():
    """They look alike, and are of other numbers."""

    def changed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x * 1.5
        straight = x.float() * cos.unsqueeze(1)
        x.mul_(2)
        return straight + rotate_half(x.float()) * sin.unsqueeze(1)

    _check(changed, expect=[], gradients=False, dtype=torch.float32)
    _check(changed, expect=[], gradients=False, dtype=torch.bfloat16, tolerance=3e-2)


def test_one_token_and_one_head():
    for sizes in ((B, H, 1, D), (B, 1, S, D), (1, 1, 1, 2)):
        _check(llama, sizes=sizes)
        _check(tokens_first, sizes=sizes)


def test_dynamic_sizes():
    for rotary in (llama, tokens_first, gpt_oss, cohere, llama_of_meta):
        _check(rotary, dynamic=True)


def test_strides_of_a_later_view():
    """Of queries that lie head by head: ours lie token by token, and cannot be viewed so."""

    def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return llama(x, cos, sin).view(-1, x.shape[-1])

    _check(rotary)


def _halves_by_turns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves that come back as neighbours."""
    first, second = x.chunk(2, -1)
    turned = torch.stack([-second, first], -1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _neighbours_side_by_side(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours that come back as halves."""
    turned = torch.cat([-x[..., 1::2], x[..., ::2]], -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _neighbours_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The second first."""
    turned = torch.stack([-x[..., ::2], x[..., 1::2]], -1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _neighbours_not_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack([x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _every_third(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = torch.cat([x, x[..., :1]], -1)[..., :D]
    turned = torch.stack([-x[..., 1::3], x[..., ::3][..., :3]], -1).flatten(-2)
    return x[..., :6] * cos[..., :6].unsqueeze(1) + turned * sin[..., :6].unsqueeze(1)


def _from_the_second(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours, of which all but the last pair move on by one."""
    turned = torch.stack([-x[..., 1::2], x[..., 1:][..., ::2]], -1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _stacked_before(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of as many neighbours as pairs: stacked in the dimension before the last."""
    x, cos, sin = x[..., :4], cos[..., :4].unsqueeze(1), sin[..., :4].unsqueeze(1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -2).flatten(-2)
    return x * cos + turned * sin


def _flattened_before(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of one head: two dimensions that are no pairs are joined."""
    x, cos, sin = x[:, :1, :, :2], cos[..., :2].unsqueeze(1), sin[..., :2].unsqueeze(1)
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(1, 2).squeeze(2).unsqueeze(1)
    return x * cos + turned * sin


def _neighbours_of_another(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.sin()
    turned = torch.stack([-y[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _signs_of_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = x[..., ::2], x[..., 1::2]
    parts = first * cos - second * sin, second * cos - first * sin
    return torch.stack(parts, dim=-1).flatten(-2)


def _mistral4(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _not_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([second, first], -1) * sin.unsqueeze(1)


def _both_negated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, -first], -1) * sin.unsqueeze(1)


def _not_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-first, second], -1) * sin.unsqueeze(1)


def _thirds(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.cat([-x[..., 3:], x[..., :3]], -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _other_dimension(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.transpose(2, 3).chunk(2, 2)
    turned = torch.cat([-second, first], 2).transpose(2, 3)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def _subtracted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) - rotate_half(x) * sin.unsqueeze(1)


def _of_another(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x.sin()) * sin.unsqueeze(1)


def _angles_of_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (torch.stack([one, 2 * one, 3 * one], 1) for one in (cos, sin))
    return x * cos + rotate_half(x) * sin


def _one_angle(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, :1].unsqueeze(1), sin[:, :1].unsqueeze(1)
    return x * cos + rotate_half(x) * sin


def _angles_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., :1].unsqueeze(1), sin[..., :1].unsqueeze(1)
    return x * cos + rotate_half(x) * sin


def _other_shapes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin[:, :1].unsqueeze(1)


def _signs_of_gpt_oss(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos - first * sin), dim=-1)


def _complex(one: Tensor, other: Tensor) -> Tensor:
    return torch.complex(one[..., : D // 2].contiguous(), other[..., : D // 2].contiguous())[
        :, None
    ]


def _complex_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The halves are a complex number's parts, and its parts are neighbours."""
    numbers = torch.view_as_complex(x.unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
    return torch.view_as_real(numbers * _complex(cos, sin)).flatten(-2)


def _complex_by_real(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * cos[..., : D // 2].unsqueeze(1)).flatten(-2)


def _complex_sum(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers + _complex(cos, sin)).flatten(-2)


def _complex_conjugated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2))).conj().resolve_conj()
    return torch.view_as_real(numbers * _complex(cos, sin)).flatten(-2)


def _complex_of_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    angles = _complex(cos, sin).repeat(1, H, 1, 1)
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * angles).flatten(-2)


def _complex_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of one pair for each head, whose dimension is joined with that of tokens."""
    x, angles = x[..., :2], _complex(cos, sin)[..., :1]
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * angles).flatten(2).view(x.shape)


def _fill(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., 0::2] = first
    out[..., 1::2] = second
    return out


def _numbers(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = x[..., 0::2], x[..., 1::2]
    return first * cos - second * sin, first * sin + second * cos


def _filled_the_other_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _numbers(x, cos, sin)
    return _fill(x, second, first).type_as(x)


def _filled_and_written_before(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = _fill(x, *_numbers(x, cos, sin))
    out[..., 0] = 1
    return out.type_as(x)


def _filled_and_written_behind(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of one memory, as the cast is none."""
    out = _fill(x, *_numbers(x, cos, sin)).type_as(x)
    out[..., 0] = 1
    return out


def _filled_late(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The result is read after the last write all the same: it is one with what is filled."""
    first, second = _numbers(x, cos, sin)
    out = torch.zeros_like(x)
    out = torch.empty_like(out)
    out[..., 0::2] = first
    result = out.type_as(x)
    out[..., 1::2] = second
    return result


def _filled_and_read(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = _fill(x, *_numbers(x, cos, sin))
    return out.type_as(x) + out.flip(-1)


def _filled_in_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = _numbers(x, cos, sin)
    out = torch.empty_like(x)
    out[..., : D // 2] = first
    out[..., D // 2 :] = second
    return out.type_as(x)


def test_pairs_that_are_written_into_a_tensor():
    """Nothing is left of that, with angles in the same precision or in another one."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = _fill(x, *_numbers(x, cos.to(wide), sin.to(wide))).type_as(x)
        return out.transpose(1, 2).sin()  # by a view of what was filled

    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 3e-2)):
        found = _check(turned, dtype=dtype, tolerance=tolerance)
        targets = {node.target for node in found.graphs[0].graph.nodes}
        assert targets.isdisjoint({operator.setitem, torch.empty_like, operator.mul, "type_as"})


def _used_elsewhere(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = rotate_half(x)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1) + turned


def _changed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x * 1.5
    straight = x * cos.unsqueeze(1)
    x.mul_(2)
    return straight + rotate_half(x) * sin.unsqueeze(1)


def _parts(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Slices of one tensor, and not the same ones."""
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    return x[..., : D // 2] * cos + rotate_half(x[..., D // 2 :]) * sin


def _five_dimensions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.unsqueeze(0)
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


NEAR_MISSES = [
    *(_mistral4, _not_negated, _both_negated, _not_turned, _halves_by_turns, _neighbours_turned),
    *(_neighbours_side_by_side, _every_third, _from_the_second, _neighbours_not_negated),
    *(_stacked_before, _flattened_before, _neighbours_of_another, _signs_of_neighbours),
    *(_thirds, _other_dimension, _subtracted, _of_another, _angles_of_heads, _one_angle),
    *(_angles_of_pairs, _other_shapes, _signs_of_gpt_oss, _used_elsewhere, _changed),
    *(_complex_halves, _complex_by_real, _complex_sum, _complex_conjugated, _complex_of_heads),
    *(_filled_the_other_way, _filled_and_written_before, _filled_and_written_behind),
    *(_filled_late, _filled_and_read, _filled_in_halves),
    _complex_tokens,
    _five_dimensions,
    _parts,
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_like_rotary(near_miss):
    _check(near_miss, expect=[], gradients=near_miss is not _changed)  # autograd refuses that


def test_angles_that_need_a_gradient():
    x, cos, sin = torch.randn(B, H, S, D), torch.randn(B, S, D), torch.randn(B, S, D)
    found = check_swap(llama, x.double(), cos.double(), sin.double(), expect=[])
    assert found.report.candidates[0].reason == "cos or sin requires a gradient"
