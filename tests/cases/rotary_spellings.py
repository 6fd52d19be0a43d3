"""Rotary embedding in the ways that models write it: of x [B, H, S, D] and the angles of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

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


def deepseek_v3(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours are moved into halves, which is no part of it."""
    b, h, s, d = x.shape
    return llama(x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d), cos, sin)


def _complex(cos: Tensor, sin: Tensor) -> Tensor:
    """Of each pair, [B, S, D / 2]."""
    return torch.complex(cos[..., : D // 2].contiguous(), sin[..., : D // 2].contiguous())


def llama4(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, size], by complex numbers."""
    x, angles = x.transpose(1, 2), _complex(cos, sin)
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    out = torch.view_as_real(numbers * angles[:, :, None, :]).flatten(3)
    return out.type_as(x)


def deepseek_v2(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * _complex(cos, sin).unsqueeze(1)).flatten(3).type_as(x)


def qwen_image(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Angles without a batch; the product the other way round."""
    x, angles = x.transpose(1, 2), _complex(cos, sin)[0].unsqueeze(1)
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(angles * numbers).reshape(x.shape)


def complex_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * _complex(cos, sin)[:, None].conj()).flatten(-2)


def wan(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[batch, tokens, heads, size], whose pairs are written into a tensor."""
    x, cos, sin = x.transpose(1, 2), cos[:1, :, None], sin[:1, :, None]
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(x)


SPELLINGS = [
    *(llama, one_batch, in_place, timm, dinov3, gpt_neox, tokens_first, tokens_first_in_memory),
    *(vision, heads_first, gpt_oss, gpt_oss_back, nanochat, flash_attention),
    *(cohere, cohere_back, gptj, flux, llama_of_meta, vllm, llama4, deepseek_v2, qwen_image),
    *(complex_back, deepseek_v3, wan),
]
