"""Models of transformers under the engine, against the same models by their eager attention."""

from __future__ import annotations

import copy
import doctest
import json

import pytest
import torch

from cudnn_ops.generation import Engine, Request, SamplingParams
from cudnn_ops.integrations import transformers_serving
from cudnn_ops.integrations.transformers_serving import (
    FAMILIES,
    ServedModel,
    load_model,
    load_tokenizer,
)
from tests.cases.server import (
    make_transformers_model,
    write_folder,
    write_tokenizer,
)
from tests.conftest import DEVICES

#: Options of their configurations: windows, angles, biases, tied weights, heads of other sizes.
VARIANTS = {
    "llama": ("llama", {}),
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    "llama 3's angles": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "mistral, wide window": ("mistral", {"sliding_window": 4096}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, windows in some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
}


def serve(served: ServedModel, prompts: list[list[int]], tokens: int, **options) -> list[Request]:
    cache = served.cache(pages=24, page_size=16)
    engine = Engine(served, cache, max_batch=3, chunk=40, max_length=served.max_length, **options)
    params = SamplingParams(tokens, logprobs=4)
    requests = [engine.submit(prompt, params) for prompt in prompts]
    list(engine.run())
    assert cache.usage().in_use == 0
    assert engine.stats.prefix_hits > 0
    return requests


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    beginning = torch.randint(256, (40,), generator=generator).tolist()
    return [
        [256, *beginning, *torch.randint(256, (own,), generator=generator).tolist()]
        for own in (1, 2, 17, 60)
    ] + [[5], [7] * 30]


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probabilities_are_those_of_the_model_alone(name):
    """Of each token of the output, in float64; prompts in chunks, pages shared and too few."""
    family, options = VARIANTS[name]
    alone = make_transformers_model(family, **options)
    served = ServedModel(copy.deepcopy(alone))
    for request in serve(served, make_prompts(), tokens=40):
        assert request.error is None
        tokens = torch.tensor([request.tokens])
        with torch.no_grad():
            logits = alone(tokens).logits[0, len(request.prompt) - 1 : -1]
        exact = logits.log_softmax(-1)
        assert len(request.logprobs) == 40
        for expected, found in zip(exact, request.logprobs, strict=True):
            # Norms are computed in float32 by both, and angles too.
            assert found.logprob == pytest.approx(expected[found.token].item(), abs=1e-4)
            assert found.logprob == pytest.approx(expected.max().item(), abs=1e-4)
            for token, logprob in found.top:
                assert logprob == pytest.approx(expected[token].item(), abs=1e-4)


@pytest.mark.parametrize("name", ["mistral, window", "qwen2, windows in some layers"])
def test_a_window_matters(name):
    """So that the test above would see one that is wrong by a token."""
    family, options = VARIANTS[name]
    tokens = torch.tensor([make_prompts()[3]])
    logits = []
    for window in (options["sliding_window"], options["sliding_window"] + 1):
        model = make_transformers_model(family, **options | {"sliding_window": window})
        with torch.no_grad():
            logits.append(model(tokens).logits[0, -1].log_softmax(-1))
    assert (logits[0] - logits[1]).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_this_packages_operators_compute(family):
    """Norms, MLPs and rotary embedding, and no parameter that learns."""
    served = ServedModel(make_transformers_model(family))
    names = [type(part).__module__ for part in served.model.modules()]
    assert sum(name.startswith("cudnn_ops") for name in names) >= 2 * 3 + 1
    attention = served.model.model.layers[0].self_attn
    assert "forward" in vars(attention)  # with rotary embedding of ours
    assert not any(weight.requires_grad for weight in served.model.parameters())
    with pytest.raises(ValueError, match="is for models that an engine calls"):
        served.model(torch.tensor([[1, 2]]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_is_replayed_from_graphs(name):
    """On a GPU, in bfloat16: near the model alone in float64 of the same weights."""
    family, options = VARIANTS[name]
    options = options | {"hidden_size": 256}
    if family != "qwen2":  # which has no other size than the quarter of the width
        options["head_dim"] = 64
    # Not so large that scores in bfloat16 are a matter of chance.
    narrow = make_transformers_model(family, torch.bfloat16, 0.08, **options).cuda()
    alone = copy.deepcopy(narrow).double()
    torch_alone = copy.deepcopy(narrow)
    served = ServedModel(narrow)
    cache = served.cache(pages=64, page_size=16)
    engine = Engine(served, cache, max_batch=3, chunk=40, max_length=served.max_length)
    engine.warm_up()
    requests = [engine.submit(each, SamplingParams(40, logprobs=0)) for each in make_prompts()]
    list(engine.run())
    assert engine.stats.replays > 30
    ours, theirs = [], []
    for request in requests:
        assert request.error is None
        tokens = torch.tensor([request.tokens], device="cuda")
        part = slice(len(request.prompt) - 1, -1)
        with torch.no_grad():
            exact, rounded = (
                model(tokens).logits[0, part].double().log_softmax(-1).cpu()
                for model in (alone, torch_alone)
            )
        for row, (each, found) in enumerate(zip(exact, request.logprobs, strict=True)):
            ours.append(abs(found.logprob - each[found.token].item()))
            theirs.append((rounded[row, found.token] - each[found.token]).abs().item())
    assert sum(ours) / len(ours) <= 2 * sum(theirs) / len(theirs) + 1e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder(family, device, tmp_path):
    """Written by transformers, read without a network."""
    folder = write_folder(tmp_path, family)
    served, tokenizer = load_model(folder, device=device), load_tokenizer(folder)
    weight = next(served.model.parameters())
    assert weight.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    assert weight.device.type == device
    assert served.vocabulary == 258
    assert served.max_length == 256
    assert load_model(folder, max_length=100, dtype=torch.bfloat16).max_length == 100
    assert tokenizer.stop_tokens == {257}
    assert tokenizer.decode(tokenizer.encode("héllo €")) == "héllo €"
    assert tokenizer.encode("a")[0] == 256
    if device == "cpu":
        model = make_transformers_model(family, torch.float32)
        request, _ = serve(served, [[1] * 20, [1] * 20], 5)
        with torch.no_grad():
            exact = model(torch.tensor([request.tokens])).logits[0, 19:-1].log_softmax(-1)
        for row, found in zip(exact, request.logprobs, strict=True):
            assert found.logprob == pytest.approx(row[found.token].item(), abs=1e-3)


def test_a_page_is_as_large_as_it_says():
    served = ServedModel(make_transformers_model("qwen3", head_dim=32))
    for dtype in (None, torch.float8_e4m3fn):
        cache = served.cache(3, 8, dtype)
        memory = sum(
            part(layer).numel() * part(layer).element_size()
            for layer in range(cache.layers)
            for part in (cache.key_cache, cache.value_cache)
        )
        assert memory == 3 * served.page_bytes(8, dtype)
        assert cache.key_cache(0).dtype == (dtype or torch.float64)


def test_conversations(tmp_path):
    make_transformers_model("llama").config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, chat=False)
    plain = load_tokenizer(tmp_path)
    assert not plain.has_chat
    write_tokenizer(tmp_path)
    own = load_tokenizer(tmp_path)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert own.has_chat
    assert own.decode(own.encode_chat(messages)) == "system: s\nuser: hi\nassistant: "
    other = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    given = load_tokenizer(tmp_path, other)
    assert given.decode(given.encode_chat(messages[1:])) == "hi"
    with pytest.raises(ValueError, match="refuses these messages: no system"):
        given.encode_chat(messages)
    broken = load_tokenizer(tmp_path, "{{ messages[")
    with pytest.raises(ValueError, match="refuses these messages"):
        broken.encode_chat(messages)


def test_what_ends_an_answer(tmp_path):
    """What any of the three files names."""
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(folder).stop_tokens == {5, 6, 257}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {}, "models of the kind 'gpt2' are not served, but llama, mistral, qwen2, qwen3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding of the kind 'dynamic' is not served",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    ],
)
def test_what_is_not_served(family, options, message, tmp_path):
    """Is refused before the weights are read, which are not even there."""
    from transformers import AutoConfig

    AutoConfig.for_model(family, **options).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match=message):
        load_model(tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        load_tokenizer(tmp_path)
    make_transformers_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises((OSError, ValueError)):
        load_tokenizer(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"max_length must be 1 to 256, .* got 257"):
        ServedModel(make_transformers_model("llama"), 257)


def test_the_example():
    result = doctest.testmod(transformers_serving)
    assert (result.failed, result.attempted > 0) == (0, True)
