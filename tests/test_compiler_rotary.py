"""The pattern of rotary embedding: every spelling that models have, and near-misses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cases.compiler import Rewritten, check_swap

B, H, S, D = 2, 3, 5, 8


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotate_chunks(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


def rotate_splits(x: Tensor) -> Tensor:
    x1, x2 = torch.split(x, x.shape[-1] // 2, dim=x.dim() - 1)
    return torch.cat((x2 * -1, x1), x.dim() - 1)


def rotate_unbound(x: Tensor) -> Tensor:
    real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.cat([-imaginary, real], dim=-1)


def rotate_unflattened(x: Tensor) -> Tensor:
    x1, x2 = x.unflatten(-1, (2, -1)).unbind(dim=-2)
    return torch.cat((torch.neg(x2), x1), dim=-1)


def rotate_narrow(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x.narrow(-1, half, half), x.narrow(-1, 0, half)), -1)


def rotate_all_dimensions(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[:, :, :, half:], x[:, :, :, :half]), dim=-1)


ROTATIONS = [
    *(rotate_half, rotate_chunks, rotate_splits, rotate_unbound, rotate_unflattened),
    *(rotate_narrow, rotate_all_dimensions),
]


def llama(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (rotate_half(x) * sin)


def one_batch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:1, None], sin[:1, None]
    return torch.add(rotate_half(x).mul(sin), x.mul(cos))


def in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x * cos.unsqueeze(1)
    out += rotate_half(x) * sin.unsqueeze(1)
    return out


def timm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    sin_emb, cos_emb = torch.cat([sin[0], cos[0]], -1).chunk(2, -1)
    return x * cos_emb + rotate_chunks(x) * sin_emb


def dinov3(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    prefix, patches = x.split((1, S - 1), dim=-2)
    cos, sin = cos[0, 1:], sin[0, 1:]
    patches = (patches * cos) + (rotate_half(patches) * sin)
    return torch.cat((prefix, patches), dim=-2)


def modernbert(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return ((x.double() * cos) + (rotate_half(x.double()) * sin)).to(x.dtype)


def ernie(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x.double() * cos + rotate_half(x).double() * sin).to(x.dtype)


def olmo(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    return (
        wide * cos.unsqueeze(1).double() + rotate_half(wide) * sin.unsqueeze(1).double()
    ).type_as(x)


def gpt_neox(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., :6].unsqueeze(1), sin[..., :6].unsqueeze(1)
    rotary_dim = cos.shape[-1]
    x_rot, x_pass = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat([(x_rot * cos) + (rotate_half(x_rot) * sin), x_pass], dim=-1)


def tokens_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    x = x.transpose(1, 2)
    return (x * cos + rotate_half(x) * sin).transpose(1, 2)


def tokens_first_in_memory(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    cos, sin = cos[0][None, :, None, :], sin[0][None, :, None, :]
    out = (x * cos + rotate_unbound(x) * sin).to(x.dtype)
    return out.transpose(1, 2)


def vision(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, size], of which there is no batch."""
    x, cos, sin = x[0].transpose(0, 1), cos[0].unsqueeze(-2), sin[0].unsqueeze(-2)
    return (x * cos) + (rotate_half(x) * sin)


def heads_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x[1]
    return x * cos[:1] + rotate_half(x) * sin[0]


def gpt_oss(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gpt_oss_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    x1, x2 = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], -1)


def nanochat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], -x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(1)) + (turned * sin.unsqueeze(1))


def flash_attention(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, size], of which a part turns."""
    x = x.transpose(1, 2)
    cos, sin = cos[0, :, : D // 4], sin[0, :, : D // 4]
    cos, sin = (torch.cat([one, one], -1).unsqueeze(-2) for one in (cos, sin))
    turned = x[..., : D // 2] * cos + rotate_chunks(x[..., : D // 2]) * sin
    return torch.cat([turned, x[..., D // 2 :]], dim=-1)


def cohere(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def cohere_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).reshape(x.shape)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def gptj(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, size], of which a part turns."""
    x = x.transpose(1, 2)
    turned, rest = x[:, :, :, :4], x[:, :, :, 4:]
    sin, cos = (torch.repeat_interleave(one[:, :, None, :2], 2, 3) for one in (sin, cos))
    both = torch.stack((-turned[:, :, :, 1::2], turned[:, :, :, ::2]), dim=-1).flatten(-2)
    return torch.cat([turned * cos + both * sin, rest], dim=-1)


def flux(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[0][None, None], sin[0][None, None]
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.double() * cos + turned.double() * sin).to(x.dtype)


def llama_of_meta(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Without complex numbers."""
    cos, sin = cos[..., : D // 2].unsqueeze(1), sin[..., : D // 2].unsqueeze(1)
    pairs = x.unflatten(-1, (-1, 2))
    first, second = pairs[..., 0], pairs[..., 1]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def vllm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[0, :, : D // 2].unsqueeze(-2), sin[0, :, : D // 2].unsqueeze(-2)
    x = x.transpose(1, 2)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


SPELLINGS = [
    *(llama, one_batch, in_place, timm, dinov3, gpt_neox, tokens_first, tokens_first_in_memory),
    *(vision, heads_first, gpt_oss, gpt_oss_back, nanochat, flash_attention),
    *(cohere, cohere_back, gptj, flux, llama_of_meta, vllm),
]


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

    found = _check(both, expect=["rotary"] * 2, dtype=torch.bfloat16, tolerance=3e-2)
    assert len(found.ours) == 2


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
