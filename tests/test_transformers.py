"""Models of transformers with ``attn_implementation="cudnn_ops"``, against their own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from cudnn_ops.integrations.transformers import register
from tests.cases.models import (
    CASES,
    CONFIGS,
    LENGTHS,
    TOKENS,
    check,
    check_all,
    logits_of,
    make_inputs,
    make_model,
    make_tokens,
    padding,
    stock,
)
from tests.conftest import DEVICES

register()
register("cudnn_ops_full", compact_masks=False)
register("cudnn_ops_unpacked", packing_under_compile=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name, case, device):
    if name == "gpt_oss" and case == "packed by position":
        case = "packed by offsets"  # the model tells its mask no positions
    check_all(name, make_model(name, device), make_inputs(case, device))


def test_greatest_lengths_as_tensors():
    inputs = make_inputs("packed by offsets", "cpu")
    inputs["max_length_q"] = inputs["max_length_k"] = torch.tensor(max(LENGTHS))
    check_all("mistral", make_model("mistral", "cpu"), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["right padding", "left padding", "packed by position"])
def test_masks_of_every_query_and_key(case, device):
    """What models that look into their mask are given."""
    model = make_model("mistral", device)
    model.set_attn_implementation("cudnn_ops_full")
    check_all("mistral", model, make_inputs(case, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_mask_of_the_user(kind, device):
    """Nothing is added to it: here each query sees the next token too, and beyond the window."""
    model = make_model("mistral", device)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device).tril(1)
    visible = visible.expand(2, 1, -1, -1)
    mask = visible if kind == torch.bool else torch.zeros(visible.shape, device=device)
    if kind != torch.bool:
        mask.masked_fill_(~visible, torch.finfo(kind).min)
    tokens = make_tokens(device)
    found = model(tokens, attention_mask=mask.to(model.dtype) if mask.is_floating_point() else mask)
    exact = stock("mistral", model, torch.float64)
    exact.set_attn_implementation("sdpa")
    rough = stock("mistral", model, model.dtype)
    check(
        found.logits,
        exact(tokens, attention_mask=visible).logits,
        rough(tokens, attention_mask=visible).logits,
        "logits",
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["no padding", "left padding"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_cached_decoding(name, kind, side, device):
    """A prompt, several tokens more (as in a chat), then one by one, over the windows' end."""
    model = make_model(name, device)
    tokens = make_tokens(device)
    there = padding("left", device) if side == "left padding" else torch.ones_like(tokens)
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=TOKENS + 5)
    found, begin = [], 0
    for end in (9, 14, *range(15, TOKENS + 1)):
        mask = None if side == "no padding" and end % 2 else there[:, :end]
        step = model(tokens[:, begin:end], attention_mask=mask, past_key_values=cache)
        found.append(step.logits)
        begin = end
    inputs = {"input_ids": tokens, "attention_mask": there}
    check(
        torch.cat(found, dim=1)[there.bool()],
        logits_of(stock(name, model, torch.float64), inputs, is_stock=True),
        logits_of(stock(name, model, model.dtype), inputs, is_stock=True),
        "logits",
    )


# In bfloat16 two logits may be equal but for rounding: test_cached_decoding compares them there.
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_generate(name, options):
    model = make_model(name, "cpu")
    prompt = make_tokens("cpu", length=10)
    there = padding("left", "cpu", 10)

    def generate(implementation: str) -> Tensor:
        model.set_attn_implementation(implementation)
        return model.generate(
            prompt, attention_mask=there, max_new_tokens=12, do_sample=False, **options
        )

    expected = generate("eager")
    assert expected.shape[1] == 22
    assert torch.equal(generate("cudnn_ops"), expected)


def compile_model(model: nn.Module) -> tuple[Any, list[Any]]:
    """Without graph breaks; and the nodes of attention."""
    nodes: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nodes.extend(node for node in module.graph.nodes if "cudnn_ops" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend), nodes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama", "plain"),
        ("llama", "left padding"),
        ("llama", "packed by offsets"),
        ("gemma2", "right padding"),
        ("gemma2", "packed by position"),
    ],
)
def test_compiled(name, case, device):
    model = make_model(name, device)
    inputs = make_inputs(case, device) | {"use_cache": False}
    compiled, nodes = compile_model(model)
    check_all(name, model, inputs, compiled)
    operator = "varlen_attention" if case == "packed by offsets" else "sdpa"
    assert [node.target.__name__.split(".")[0] for node in nodes] == [operator] * 2


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_without_a_mask(name):
    """Positions that are promised not to restart leave nothing to hide but future and past."""
    model = make_model(name, "cpu")
    model.set_attn_implementation("cudnn_ops_unpacked")
    compiled, nodes = compile_model(model)
    check_all(name, model, make_inputs("plain", "cpu") | {"use_cache": False}, compiled)
    assert [node.args[3] for node in nodes] == [None, None]
    assert [node.args[5] for node in nodes] == [True, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["right padding", "packed by position"])
def test_gradient_checkpointing(case, device):
    model = make_model("qwen2", device).train()
    model.gradient_checkpointing_enable()
    check_all("qwen2", model, make_inputs(case, device))
