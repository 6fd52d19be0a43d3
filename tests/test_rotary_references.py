"""Rotary embedding by the code of models: transformers', diffusers', and Llama's original one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers.models import embeddings as diffusers
from torch import Tensor
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.glm import modeling_glm as glm
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama4 import modeling_llama4 as llama4
from transformers.models.phi import modeling_phi as phi
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as qwen2_5_config
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5
from transformers.models.qwen2_vl import configuration_qwen2_vl as qwen2_config
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2

import cudnn_ops
from tests.cases import sdpa
from tests.conftest import DEVICES

B, H, KV, S, D = 2, 4, 2, 9, 64
N = 50
Both = tuple[Tensor, Tensor]
DTYPES = {"cpu": torch.float64, "cuda": torch.bfloat16}


def check(
    device: str, ours: Callable[[Tensor, Tensor], Both], theirs: Callable[[Tensor, Tensor], Both]
) -> None:
    """Results and gradients, of queries and keys [B, S, heads, D]."""
    torch.manual_seed(4)
    dtype = DTYPES[device]
    leaves = [
        torch.randn(B, S, heads, D, device=device, dtype=dtype, requires_grad=True)
        for heads in (H, KV)
    ]
    grads = [torch.randn_like(leaf) for leaf in leaves]

    def run(function: Callable[..., Both], wide: torch.dtype) -> list[Tensor]:
        inputs = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
        outs = function(*inputs)
        weights = [grad.to(out) for grad, out in zip(grads, outs, strict=True)]
        return [*outs, *torch.autograd.grad(outs, inputs, weights)]

    found = run(ours, dtype)
    exact, rough = run(theirs, torch.float64), run(theirs, dtype)
    for mine, right, like in zip(found, exact, rough, strict=True):
        sdpa.check(mine, right, like.to(dtype), "rotary")


def ours_of(cos: Tensor, sin: Tensor, **options: object) -> Callable[[Tensor, Tensor], Both]:
    def run(q: Tensor, k: Tensor) -> Both:
        angles = [x.to(torch.promote_types(q.dtype, torch.float32)) for x in (cos, sin)]
        function: Callable[..., Both] = cudnn_ops.rotary_embedding_qk
        out, key = function(q.transpose(1, 2), k.transpose(1, 2), *angles, **options)
        return out.transpose(1, 2), key.transpose(1, 2)

    return run


def heads_second(
    apply: Callable[..., Both], cos: Tensor, sin: Tensor
) -> Callable[[Tensor, Tensor], Both]:
    """A function of transformers of [B, heads, S, D]."""

    def run(q: Tensor, k: Tensor) -> Both:
        out, key = apply(q.transpose(1, 2), k.transpose(1, 2), cos.to(q), sin.to(q))
        return out.transpose(1, 2), key.transpose(1, 2)

    return run


def table(columns: int, device: str) -> Both:
    """Cosines and sines of N positions for each of the pairs."""
    angles = torch.outer(torch.arange(N), 10_000.0 ** (-torch.arange(columns) / columns))
    return angles.cos().double().to(device), angles.sin().double().to(device)


def drawn_positions(device: str, *axes: int) -> Tensor:
    return torch.randint(N, (*axes, B, S), generator=torch.Generator().manual_seed(2)).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_gptj(device):
    """Neighbours of a part of each head, by positions in its table."""
    turned = 16
    embed = gptj.create_sinusoidal_positions(N, turned).double().to(device)
    sin, cos = embed.chunk(2, -1)
    positions = drawn_positions(device)

    def theirs(q: Tensor, k: Tensor) -> Both:
        def turn(x: Tensor) -> Tensor:
            angles = (part[positions].to(x) for part in (sin, cos))
            part = gptj.apply_rotary_pos_emb(x[..., :turned], *angles)
            return torch.cat([part, x[..., turned:]], -1)

        return turn(q), turn(k)

    options = {"interleaved": True, "rotary_dim": turned, "positions": positions}
    check(device, ours_of(cos, sin, **options), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_gpt_neox(device):
    """Halves of a part of each head."""
    cos, sin = (torch.cat([t, t], -1)[drawn_positions(device)] for t in table(8, device))
    theirs = heads_second(gpt_neox.apply_rotary_pos_emb, cos, sin)
    check(device, ours_of(cos, sin, rotary_dim=16), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_phi(device):
    cos, sin = (torch.cat([t, t], -1)[drawn_positions(device)] for t in table(16, device))

    def theirs(q: Tensor, k: Tensor) -> Both:
        turn = heads_second(phi.apply_rotary_pos_emb, cos, sin)
        parts = turn(q[..., :32], k[..., :32])
        return torch.cat([parts[0], q[..., 32:]], -1), torch.cat([parts[1], k[..., 32:]], -1)

    check(device, ours_of(cos, sin, rotary_dim=32), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_glm(device):
    """Neighbours of a part of each head, by the first half of the angles."""
    cos, sin = table(16, device)
    positions = drawn_positions(device)
    twice = (torch.cat([t, t], -1)[positions] for t in (cos, sin))
    theirs = heads_second(glm.apply_rotary_pos_emb, *twice)
    options = {"interleaved": True, "rotary_dim": 32, "positions": positions}
    check(device, ours_of(cos, sin, **options), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_cohere(device):
    cos, sin = (t.repeat_interleave(2, -1)[drawn_positions(device)] for t in table(D // 2, device))

    def theirs(q: Tensor, k: Tensor) -> Both:
        # Theirs computes in float32 whatever comes in.
        out, key = heads_second(cohere.apply_rotary_pos_emb, cos, sin)(q, k)
        return out, key

    torch.manual_seed(1)
    q, k = (torch.randn(B, S, n, D, device=device) for n in (H, KV))
    for mine, right in zip(ours_of(cos, sin, interleaved=True)(q, k), theirs(q, k), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_llama_of_complex_numbers(device):
    """The original form, which Llama 4 still has."""
    cos, sin = table(D // 2, device)
    positions = drawn_positions(device)
    torch.manual_seed(1)
    q, k = (torch.randn(B, S, n, D, device=device) for n in (H, KV))
    factors = torch.complex(cos, sin)[positions].to(torch.complex64)
    theirs = llama4.apply_rotary_emb(q, k, factors)
    options = {"interleaved": True, "rotary_dim": D, "positions": positions}
    for mine, right in zip(ours_of(cos, sin, **options)(q, k), theirs, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_text_of_qwen_vl(name, device):
    """Sections of time, height and width, from three axes of positions."""
    module, configs = (qwen2, qwen2_config) if name == "qwen2_vl" else (qwen2_5, qwen2_5_config)
    sections = [8, 12, 12]
    prefix = "Qwen2VL" if name == "qwen2_vl" else "Qwen2_5_VL"
    config = getattr(configs, f"{prefix}TextConfig")(
        hidden_size=H * D,
        num_attention_heads=H,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections},
    )
    embedding = getattr(module, f"{prefix}RotaryEmbedding")(config).to(device)
    positions = drawn_positions(device, 3)
    cos, sin = embedding(torch.ones(1, device=device, dtype=torch.float64), positions)
    assert cos.shape == (B, S, D)
    angles = torch.outer(torch.arange(N, device=device), embedding.inv_freq)
    options = {"rotary_dim": D, "positions": positions, "sections": sections}
    theirs = heads_second(module.apply_rotary_pos_emb, cos, sin)
    check(device, ours_of(angles.cos().double(), angles.sin().double(), **options), theirs)
    # The angles of all axes, not of a table.
    of_axes = torch.cat([angles, angles], -1)[positions]
    cos, sin = of_axes.cos().double(), of_axes.sin().double()
    check(device, ours_of(cos, sin, sections=sections), theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_vision_of_qwen_vl(device):
    """Rows and columns of an image, by the same frequencies."""
    config = qwen2_config.Qwen2VLVisionConfig(embed_dim=H * D, num_heads=H)
    config.num_attention_heads = H
    embedding = qwen2.Qwen2VLVisionRotaryEmbedding(config).to(device)
    positions = drawn_positions(device, 2)
    angles = torch.outer(torch.arange(N, device=device), embedding.inv_freq)
    both = torch.cat([angles, angles], -1)
    options = {"rotary_dim": D, "positions": positions, "sections": (D // 4, D // 4)}
    torch.manual_seed(1)
    q, k = (torch.randn(B, S, n, D, device=device) for n in (H, KV))
    found = ours_of(both.cos(), both.sin(), **options)(q, k)
    for i in range(B):
        cos, sin = embedding(q, positions[:, i].T)
        expected = qwen2.apply_rotary_pos_emb_vision(q[i], k[i], cos, sin)
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(mine[i], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("unbind", [-1, -2])
@pytest.mark.parametrize("sequence_dim", [1, 2])
def test_diffusers(sequence_dim, unbind, device):
    """Flux's axes, and halves as Stable Audio has them; ours in the adapter, too."""
    from cudnn_ops.integrations.diffusers_attention import rotate

    torch.manual_seed(1)
    x = torch.randn(B, S, H, D, device=device)
    ids = torch.randint(N, (S,), device=device).float()
    parts = [
        diffusers.get_1d_rotary_pos_embed(size, ids, use_real=True, repeat_interleave_real=True)
        for size in (16, 24, 24)
    ]
    angles = tuple(torch.cat([part[i] for part in parts], -1).to(device) for i in range(2))
    x = x if sequence_dim == 1 else x.transpose(1, 2)
    expected = diffusers.apply_rotary_emb(
        x, angles, use_real_unbind_dim=unbind, sequence_dim=sequence_dim
    )
    found = rotate(x, angles, use_real_unbind_dim=unbind, sequence_dim=sequence_dim)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    factors = torch.complex(*(angle[:, ::2] for angle in angles))
    if sequence_dim == 1:  # complex: theirs runs
        torch.testing.assert_close(
            rotate(x, factors[None], use_real=False),
            diffusers.apply_rotary_emb(x, factors[None], use_real=False),
        )
