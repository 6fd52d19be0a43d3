"""Attention, transformer blocks and vision transformers, beside the models that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    GptOssConfig,
    LlamaConfig,
    MllamaConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mllama.modeling_mllama import MllamaCrossAttentionDecoderLayer
from transformers.models.phi.modeling_phi import PhiDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

import cudnn_ops
from benchmarks.bench_blocks import BERT, LLAMA, QWEN3, Names, renamed
from cudnn_ops.nn import Attention, CrossAttentionBlock, TransformerBlock, VisionTransformer
from tests.cases import models
from tests.cases.linear import Sums
from tests.conftest import DEVICES

B, S, DIM, HEADS, HIDDEN = 2, 9, 64, 4, 96
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
#: The norm of a gradient that is none but for rounding, in float64.
ZERO = 1e-10

PHI: Names = {"self_attn.dense": "attention.o_proj", **LLAMA}
GPT_OSS: Names = {"o_proj": "o_proj", "sinks": "sinks", "": "qkv."}
MLLAMA: Names = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "cross_attn_attn_gate": "attention_gate",
    "cross_attn_mlp_gate": "mlp_gate",
    "cross_attn.k_proj": "attention.kv.k_proj",
    "cross_attn.v_proj": "attention.kv.v_proj",
    "cross_attn.": "attention.",
}


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """Those of all parameters, under the names of the state_dict: merged layers have parts."""
    like = copy.deepcopy(module)
    with torch.no_grad():
        for parameter, copied in zip(module.parameters(), like.parameters(), strict=True):
            assert parameter.grad is not None
            copied.copy_(parameter.grad)
    return dict(like.state_dict())


def check(
    ours: nn.Module,
    theirs: nn.Module,
    names: Names,
    call: Callable[[nn.Module, Tensor], Tensor],
    x: Tensor,
) -> None:
    """The results of theirs in float64, and the gradients of input and parameters.

    Args:
        ours: gets the parameters of theirs.
        theirs: the reference.
        names: of parameters.
        call: calls either with an input; what else it needs must be of the input's dtype.
        x: the input.
    """
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours.load_state_dict({renamed(k, names): v for k, v in theirs.state_dict().items()})
    double = copy.deepcopy(theirs).double()
    found = []
    for module, like in ((ours, x), (double, x.double()), (theirs, x)):
        leaf = like.detach().clone().requires_grad_()
        out = call(module, leaf)
        out.sin().sum().backward()
        assert leaf.grad is not None
        grads = _gradients(module)
        if module is not ours:
            grads = {renamed(key, names): grad for key, grad in grads.items()}
        found.append({"out": out.detach(), "the input's gradient": leaf.grad, **grads})
    # A bias of all keys changes no softmax: what there is of its gradient is rounding, in both.
    zeros = [name for name, right in found[1].items() if right.norm() < ZERO]
    actual, exact, rough = (models.with_joined(one, zeros) for one in found)
    for name, right in exact.items():
        models.check(actual[name], right, rough[name], name)


def _input(device: str) -> Tensor:
    """An input of all blocks; it sets the seed of the weights that :func:`check` draws next, too.

    Rows whose softmax is nearly one key's have gradients that are differences of equal numbers: in
    bfloat16 a few draws in a hundred have little else.
    """
    torch.manual_seed(0)
    return torch.randn(B, S, DIM, device=device, dtype=DTYPES[device])


def _rotation(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(S) + 3.0, 100 ** -torch.linspace(0, 1, size // 2))
    angles = angles.repeat(1, 2)[None].to(x.device)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _causal(x: Tensor, window: int = S) -> Tensor:
    behind = torch.ones(S, S, device=x.device, dtype=torch.bool).tril()
    seen = behind & behind.T.tril(window - 1).T.triu(1 - window)
    return torch.zeros(S, S, device=x.device, dtype=x.dtype).masked_fill(~seen, -1e9)[None, None]


def _made(kind: Callable[..., nn.Module], config: PreTrainedConfig, device: str) -> nn.Module:
    config._attn_implementation = "eager"
    return kind(config, layer_idx=0).to(device, DTYPES[device])


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _call_decoder(size: int) -> Callable[[nn.Module, Tensor], Tensor]:
    def call(module: nn.Module, x: Tensor) -> Tensor:
        cos, sin = _rotation(x, size)
        if isinstance(module, TransformerBlock):
            return module(x, cos=cos, sin=sin)
        return _first(module(x, attention_mask=_causal(x), position_embeddings=(cos, sin)))

    return call


SIZES = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("device", DEVICES)
def test_llama(device):
    config = LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=1e-5)
    ours = TransformerBlock(
        *(DIM, HEADS, HIDDEN),
        norm="rms",
        eps=1e-5,
        gated=True,
        mlp_bias=False,
        kv_heads=2,
        is_causal=True,
        device=device,
        dtype=DTYPES[device],
    )
    theirs = _made(LlamaDecoderLayer, config, device)
    check(ours, theirs, LLAMA, _call_decoder(DIM // HEADS), _input(device))


@pytest.mark.parametrize("device", DEVICES)
def test_qwen3(device):
    """Queries and keys are normed, and heads are larger than their share of a token."""
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32)
    ours = TransformerBlock(
        *(DIM, HEADS, HIDDEN),
        norm="rms",
        gated=True,
        mlp_bias=False,
        kv_heads=2,
        head_dim=32,
        qk_norm="rms",
        is_causal=True,
        device=device,
        dtype=DTYPES[device],
    )
    check(ours, _made(Qwen3DecoderLayer, config, device), QWEN3, _call_decoder(32), _input(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_phi(part, device):
    """Attention and MLP side by side; a part of each head turns."""
    config = PhiConfig(**SIZES, partial_rotary_factor=part, resid_pdrop=0.0)
    turned = int(DIM // HEADS * part)
    ours = TransformerBlock(
        *(DIM, HEADS, HIDDEN),
        order="parallel",
        eps=config.layer_norm_eps,
        activation="gelu_tanh",
        bias=True,
        is_causal=True,
        rotary_dim=turned,
        device=device,
        dtype=DTYPES[device],
    )
    theirs = _made(PhiDecoderLayer, config, device)
    check(ours, theirs, PHI, _call_decoder(turned), _input(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("qk_norm", ["none", "rms"])
def test_options_of_rotary_embedding(qk_norm, device):
    """Neighbours of a part of each head, by positions on two axes: as it is without the module."""
    torch.manual_seed(0)
    place = {"device": device, "dtype": DTYPES[device]}
    options = {"interleaved": True, "rotary_dim": 8, "sections": (1, 3)}
    attention = Attention(
        *(DIM, HEADS, 2),
        qk_norm=qk_norm,
        **{f"rotary_{name.removeprefix('rotary_')}": value for name, value in options.items()},
        **place,
    )
    x = _input(device)
    positions = torch.randint(20, (2, *x.shape[:2]), device=device)
    angles = torch.rand(20, 4, **place)
    angles = {"cos": angles.cos(), "sin": angles.sin(), "positions": positions}
    found = attention(x, **angles)
    query, key, value = attention.qkv(x)
    if qk_norm == "rms":
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = (
        cudnn_ops.rotary_embedding(
            part, angles["cos"], angles["sin"], positions=positions, **options
        )
        for part in (query, key)
    )
    out = cudnn_ops.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, attention.o_proj(out.transpose(1, 2).flatten(2)))
    assert not torch.allclose(found, attention(x))


@pytest.mark.parametrize("device", DEVICES)
def test_bert(device):
    """Norms behind the sums, and padding."""
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours = TransformerBlock(
        *(DIM, HEADS, HIDDEN),
        order="post",
        eps=config.layer_norm_eps,
        bias=True,
        device=device,
        dtype=DTYPES[device],
    )
    lens = torch.tensor([S, 5], dtype=torch.int32, device=device)
    is_there = torch.arange(S, device=device) < lens[:, None]

    def call(module: nn.Module, x: Tensor) -> Tensor:
        if module is ours:
            out = module(x, seq_lens_kv=lens)
        else:
            hidden = torch.zeros(B, S, device=device, dtype=x.dtype).masked_fill(~is_there, -1e9)
            out = _first(module(x, hidden[:, None, None]))
        return out[is_there]

    check(ours, _made(BertLayer, config, device), BERT, call, _input(device))


@pytest.mark.parametrize("device", DEVICES)
def test_gpt_oss(device):
    """Sinks and a window."""
    sliding: Any = {"layer_types": ["sliding_attention"], "sliding_window": 4}
    config = GptOssConfig(
        **SIZES, **sliding, num_key_value_heads=2, head_dim=16, attention_bias=True
    )
    ours = Attention(
        *(DIM, HEADS, 2),
        bias=True,
        is_causal=True,
        window_size=(3, 0),
        sinks=True,
        device=device,
        dtype=DTYPES[device],
    )

    def call(module: nn.Module, x: Tensor) -> Tensor:
        cos, sin = _rotation(x, 16)
        if module is ours:
            return module(x, cos=cos, sin=sin)
        halves = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        return _first(module(x, halves, _causal(x, window=4)))

    check(ours, _made(GptOssAttention, config, device), GPT_OSS, call, _input(device))


@pytest.mark.parametrize("device", DEVICES)
def test_cross_attention_of_mllama(device):
    text = {**SIZES, "num_key_value_heads": 2, "cross_attention_layers": [0]}
    config = MllamaConfig(text_config=text).text_config
    ours = CrossAttentionBlock(
        *(DIM, DIM, HEADS, HIDDEN),
        eps=config.rms_norm_eps,
        kv_heads=2,
        qk_norm="rms",
        qk_norm_eps=config.rms_norm_eps,
        device=device,
        dtype=DTYPES[device],
    )
    image = torch.randn(B, 7, DIM, device=device, dtype=DTYPES[device])

    def call(module: nn.Module, x: Tensor) -> Tensor:
        context = image.to(x.dtype)
        if module is ours:
            return module(x, context)
        return _first(
            module(
                x,
                cross_attention_states=context,
                cross_attention_mask=torch.zeros(B, 1, S, 7, device=device, dtype=x.dtype),
                attention_mask=None,
                full_text_row_masked_out_mask=None,
            )
        )

    theirs = _made(MllamaCrossAttentionDecoderLayer, config, device)
    check(ours, theirs, MLLAMA, call, _input(device))


IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 2, "classes": 10}


def _torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, HEADS, DIM, HIDDEN, num_classes=10)


def _timm(**options: Any) -> nn.Module:
    sizes: Any = {"img_size": 32, "patch_size": 8, "embed_dim": DIM, "depth": 2, "num_heads": HEADS}
    return timm.models.VisionTransformer(**sizes, mlp_ratio=HIDDEN / DIM, num_classes=10, **options)


VISION: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "torchvision": (_torchvision, {}),
    "timm": (_timm, {}),
    "timm mean": (lambda: _timm(class_token=False, global_pool="avg"), {"pool": "mean"}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", VISION)
def test_vision_transformers_load(kind, device):
    make, options = VISION[kind]
    place: Any = {"device": device, "dtype": DTYPES[device]}
    torch.manual_seed(0)
    theirs = make().to(device, DTYPES[device])
    ours = VisionTransformer(**IMAGE, dim=DIM, heads=HEADS, hidden=HIDDEN, **options, **place)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    given = theirs.state_dict()
    keys = list(given)
    ours.load_state_dict(given)
    assert list(given) == keys, "the caller's dictionary is changed"
    x = torch.randn(3, 3, 32, 32, **place)
    found = []
    for module in (ours, copy.deepcopy(theirs).double(), theirs):
        leaf = x.to(next(module.parameters()).dtype).requires_grad_()
        out = module(leaf)
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf)
        found.append((out.detach(), grad))
    for name, mine, right, other in zip(("out", "gradient"), *found, strict=True):
        models.check(mine, right, other, name)
    # Its own keys load too.
    again = VisionTransformer(**IMAGE, dim=DIM, heads=HEADS, hidden=HIDDEN, **options, **place)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), ours(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
def test_decoding_from_a_cache(window, device):
    """A prompt in two pieces and tokens one by one, as the whole at once."""
    block = TransformerBlock(
        *(DIM, HEADS, HIDDEN),
        norm="rms",
        gated=True,
        kv_heads=2,
        is_causal=True,
        window_size=window,
        qk_norm="rms",
        device=device,
        dtype=DTYPES[device],
    ).eval()
    x = _input(device)
    cos, sin = _rotation(x, DIM // HEADS)
    place: Any = {"device": device, "dtype": DTYPES[device]}
    cache = cudnn_ops.KVCache(2, B, S + 2, 2, DIM // HEADS, **place)
    with torch.no_grad():
        whole = block(x, cos=cos, sin=sin)
        parts, begin = [], 0
        for count in (4, 3, 1, 1):
            end = begin + count
            turned = {"cos": cos[:, begin:end], "sin": sin[:, begin:end]}
            parts.append(block(x[:, begin:end], **turned, cache=cache, layer=1))
            begin = end
    tolerance = 2e-5 if device == "cpu" else 4e-2
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=tolerance, atol=tolerance)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    attention = Attention(DIM, HEADS, dropout=0.5)
    x = _input("cpu")
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
def test_compiled(order):
    block = TransformerBlock(DIM, HEADS, HIDDEN, order=order, is_causal=True)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 9):
        x = torch.randn(B, length, DIM)
        torch.testing.assert_close(compiled(x), block(x))


def test_norms_that_are_replaced_are_called():
    """An adapter's norm in place of ours gets the sum."""
    block = TransformerBlock(DIM, HEADS, HIDDEN)
    block.norm2 = nn.Identity()
    x = _input("cpu")
    total = x + block.attention(block.norm1(x))
    torch.testing.assert_close(block(x), total + block.mlp(total))


def test_what_is_refused():
    x, context = _input("cpu"), torch.randn(B, 7, 16)
    cos, sin = _rotation(x, DIM // HEADS)
    with pytest.raises(ValueError, match=r"heads, 4, is no multiple of kv_heads, 3"):
        Attention(DIM, 4, 3)
    with pytest.raises(ValueError, match=r"dim, 62, is no multiple of heads, 4; head_dim says"):
        Attention(62, 4)
    with pytest.raises(ValueError, match=r"qk_norm must be one of 'none', 'rms', 'layer'; got 'x'"):
        Attention(DIM, 4, qk_norm="x")
    plain, of_context = Attention(DIM, 4), Attention(DIM, 4, context_dim=16)
    with pytest.raises(ValueError, match="context must be None"):
        plain(x, context)
    with pytest.raises(ValueError, match="context must be given"):
        of_context(x)
    with pytest.raises(ValueError, match="no rotary embedding and no cache"):
        of_context(x, context, cos=cos, sin=sin)
    with pytest.raises(ValueError, match="cos and sin must be given together"):
        plain(x, cos=cos)
    with pytest.raises(ValueError, match="positions must be given with cos and sin"):
        plain(x, positions=torch.zeros(1, S, dtype=torch.int64))
    cache = cudnn_ops.KVCache(1, B, S, 4, 16, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="seq_lens_kv must be None with a cache"):
        plain(x, cache=cache, seq_lens_kv=torch.tensor([1, 2], dtype=torch.int32))
    for options, message in (
        ({"norm": "batch"}, "norm must be one of 'layer', 'rms'; got 'batch'"),
        ({"order": "mid"}, "order must be one of 'pre', 'post', 'parallel'; got 'mid'"),
        ({"context_dim": 8}, "context_dim is not accepted; CrossAttentionBlock"),
        ({"activation": "swish"}, "swish"),
    ):
        with pytest.raises(ValueError, match=message):
            TransformerBlock(DIM, 4, HIDDEN, **options)
    with pytest.raises(ValueError, match="patch_size, 5, does not divide image_size, 32"):
        VisionTransformer(32, 5)
    with pytest.raises(ValueError, match="pool must be 'class' or 'mean'; got 'max'"):
        VisionTransformer(32, 8, pool="max")
    model = VisionTransformer(**IMAGE, dim=DIM, heads=HEADS, hidden=HIDDEN)
    with pytest.raises(ValueError, match=r"images must be \[B, C, 32, 32\], got \[1, 3, 16, 16\]"):
        model(torch.randn(1, 3, 16, 16))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(_timm(reg_tokens=2).state_dict())


@pytest.mark.parametrize("qk_norm", ["none", "rms"])
def test_gradients_of_queries_keys_and_values_are_moved_once(qk_norm):
    """Into one tensor, for the product's gradients; nothing is copied besides."""
    attention = Attention(64, 4, kv_heads=2, qk_norm=qk_norm)
    angles = torch.randn(1, 9, 16)
    x = torch.randn(2, 9, 64, requires_grad=True)
    out = attention(x, cos=angles.cos(), sin=angles.sin())
    moved = []

    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.cat, torch.ops.aten.clone):
                moved.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Moves():
        torch.autograd.grad(out, [x, *attention.parameters()], torch.ones_like(out))
    assert moved == [torch.ops.aten.cat]


@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_block_without_gradients(order, gated, device):
    """Its sums are in the products, unless attention or the MLP is another's."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"order": order, "gated": gated, "bias": True}
    block = TransformerBlock(DIM, HEADS, HIDDEN, **options, device=device, dtype=torch.bfloat16)
    x = torch.randn(B, S, DIM, device=device, dtype=torch.bfloat16)
    right = copy.deepcopy(block).cpu().double()(x.cpu().double()).detach().to(device)
    apart = block(x).detach()
    with torch.no_grad():
        with Sums() as sums:
            models.check(block(x), right, apart, "own")
        assert sums.in_products == 2
        own = block.mlp
        for name, module in (("mlp", nn.Sequential(own)), ("attention", Passing(block.attention))):
            setattr(block, name, module)
            with Sums() as sums:
                models.check(block(x), right, apart, name)
            assert sums.in_products == 0
            block.mlp = own
    with torch.no_grad(), torch.autocast(device, torch.bfloat16), Sums() as sums:
        block.to(torch.float32)(x.float())
    assert sums.in_products == 0


class Passing(nn.Module):
    """What someone put in the place of attention: it knows nothing of residuals."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x)
        return out
