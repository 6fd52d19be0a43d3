"""Models of diffusers on this package's operators, against their own."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DModel,
)
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from cudnn_ops.integrations.diffusers import optimize_
from cudnn_ops.integrations.diffusers_kinds import KINDS, computes_the_same
from tests.cases.diffusion import MODELS, draw, make, make_inputs, make_unet
from tests.conftest import DEVICES


def results(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters that have one."""
    model.zero_grad()
    out = model(**inputs, return_dict=False)[0]
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


class Calls(TorchDispatchMode):
    """Counts the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cudnn_ops":
            given = dict(
                zip((argument.name for argument in func._schema.arguments), args, strict=False)
            )
            added = [given.get(name) for name in ("update", "residual")]
            ending = " of a sum" if any(isinstance(x, Tensor) for x in added) else ""
            name = func._schema.name.removeprefix("cudnn_ops::").removeprefix("_")
            self.names[name + ending] += 1
        return func(*args, **(kwargs or {}))


def optimized(model: nn.Module) -> nn.Module:
    changed = copy.deepcopy(model)
    optimize_(changed)
    return changed


def check(found: dict[str, Tensor], exact: dict[str, Tensor], rough: dict[str, Tensor]) -> None:
    """At most twice the error of the stock model in our precision, and a small floor."""
    assert found.keys() == exact.keys() == rough.keys()
    # Some gradients are zero but for rounding: those of the keys' biases.
    size = max(float(grad.norm()) for name, grad in exact.items() if name != "output")
    floor = 2e-2 if found["output"].dtype == torch.bfloat16 else 1e-5
    for name in found:
        error, allowed = (
            float((one[name].double() - exact[name]).norm()) for one in (found, rough)
        )
        scale = float(exact[name].norm()) + (0 if name == "output" else 1e-2 * size)
        assert error <= 2 * allowed + floor * scale, (name, error, allowed, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, dtype, device, without_tf32):
    model = make(name, device, dtype)
    inputs = make_inputs(name, device, dtype)
    rough = results(model, inputs)
    if not all(tensor.isfinite().all() for tensor in rough.values()):
        # As some gradients of Flux in bfloat16 on a GPU are not.
        on_cpu = results(make(name, "cpu", dtype), make_inputs(name, "cpu", dtype))
        rough = {key: tensor.to(device) for key, tensor in on_cpu.items()}
    widened = make_inputs(name, device, dtype)
    widened = {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in widened.items()
    }
    if name == "sdxl":
        widened["added_cond_kwargs"] = {
            key: value.double() for key, value in widened["added_cond_kwargs"].items()
        }
    exact = results(copy.deepcopy(model).double(), widened)
    check(results(optimized(model), inputs), exact, rough)


@pytest.mark.parametrize("name", MODELS)
def test_operators_are_called(name):
    model, inputs = optimized(make(name)), make_inputs(name)
    with Calls() as calls, torch.no_grad():
        model(**inputs)
    assert MODELS[name][2] <= set(calls.names)


@pytest.mark.parametrize("name", MODELS)
def test_compiled_as_one_graph(name):
    torch._dynamo.reset()
    model, inputs = optimized(make(name)), make_inputs(name)
    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**inputs, return_dict=False)[0], expected)


@pytest.mark.parametrize("name", MODELS)
def test_state_dict_and_restoring(name):
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    modules = [(path, type(module)) for path, module in model.named_modules()]
    report = optimize_(model)
    assert report.changed
    assert not report.left
    assert not optimize_(model).changed
    for now in (model.state_dict(), make(name).state_dict()):
        assert list(now) == list(before)
        assert all(torch.equal(now[key], before[key]) for key in before)
    assert all(p is parameters[path] for path, p in model.named_parameters())
    report.restore_()
    assert [(path, type(module)) for path, module in model.named_modules()] == modules
    assert not any("forward" in module.__dict__ for module in model.modules())
    with Calls() as calls, torch.no_grad():
        model(**make_inputs(name))
    assert not calls.names


def test_every_class_computes_the_same():
    assert [cls.__name__ for cls in KINDS if not computes_the_same(cls)] == []


def test_a_dry_run_changes_nothing():
    model = make("unet")
    would = optimize_(model, dry_run=True)
    assert not any("forward" in module.__dict__ for module in model.modules())
    done = optimize_(model)
    assert sorted(map(str, would.changed)) != []
    assert {str(one) for one in done.changed} <= {str(one) for one in would.changed}


def test_memory_of_convolutions():
    model = make("vae")
    report = optimize_(model, channels_last=False)
    assert all(p.is_contiguous() for p in model.parameters())
    report.restore_()
    optimize_(model)
    assert model.decoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_decoding_and_encoding():
    model, image = make("vae"), draw(2, 3, 16, 16)
    changed = optimized(model)
    with torch.no_grad():
        mean = model.encode(image).latent_dist.mean
        torch.testing.assert_close(changed.encode(image).latent_dist.mean, mean)
        torch.testing.assert_close(changed.decode(mean).sample, model.decode(mean).sample)


def _reasons(model: nn.Module) -> list[str]:
    return [one.reason for one in optimize_(model).left]


def test_another_activation_is_left_alone():
    model = make_unet(act_fn="gelu").eval()
    reasons = _reasons(model)
    assert reasons.count("its nonlinearity is GELU of torch") == sum(
        type(module) is ResnetBlock2D for module in model.modules()
    )
    assert "GELU follows it" in reasons
    inputs = make_inputs("unet")
    stock = make_unet(act_fn="gelu").eval()
    stock.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).sample, stock(**inputs).sample)


def test_processors_of_others_are_left_alone():
    class Mine:
        def __call__(self, attn, hidden_states, **kwargs):
            return hidden_states

    model = make("unet")
    model.set_attn_processor(Mine())
    assert set(_reasons(model)) == {"Mine is not diffusers'"}
    model.set_attn_processor(AttnProcessor())
    assert set(_reasons(model)) == {"AttnProcessor does not call scaled_dot_product_attention"}


def test_hooks_are_left_alone_and_seen_later():
    model = make("unet")
    block = next(module for module in model.modules() if type(module) is ResnetBlock2D)
    block.norm1.register_forward_hook(lambda *_: None)
    assert _reasons(model) == ["its norm1 has hooks"]
    assert "forward" not in block.__dict__

    model = optimized(make("unet"))
    called = []
    block = next(module for module in model.modules() if type(module) is ResnetBlock2D)
    block.norm2.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        expected = make("unet")(**make_inputs("unet")).sample
        torch.testing.assert_close(model(**make_inputs("unet")).sample, expected)
    assert called == [1]


class Low(nn.Linear):
    """As an adapter's layer that takes a linear layer's place."""


def test_replaced_layers_are_called():
    model = make("dit")
    ff = next(module for module in model.modules() if isinstance(module, FeedForward))
    ff.net[2] = Low(ff.net[2].in_features, ff.net[2].out_features)
    assert _reasons(model) == ["its net.2 is Low of tests"]

    model = make("dit")
    optimize_(model)
    ff = next(module for module in model.modules() if isinstance(module, FeedForward))
    low = Low(ff.net[2].in_features, ff.net[2].out_features)
    called = []
    low.register_forward_hook(lambda *_: called.append(1))
    ff.net[2] = low
    with torch.no_grad():
        model(**make_inputs("dit"))
    assert called == [1]


def test_dropout_in_training():
    ff = FeedForward(8, dropout=0.5, activation_fn="gelu").train()
    x = draw(2, 5, 8)
    torch.manual_seed(3)
    expected = ff(x)
    holder = nn.ModuleList([ff])
    assert optimize_(holder).counts() == {"FeedForward": 1}
    torch.manual_seed(3)
    torch.testing.assert_close(ff(x), expected)


@pytest.mark.parametrize("norm", [None, "layer_norm"])
def test_attention_with_masks(norm):
    attention = Attention(16, heads=2, dim_head=8, qk_norm=norm)
    x, bias = draw(2, 6, 16), torch.zeros(2, 1, 6)
    bias[1, :, 3:] = -10000.0
    expected = attention(x, attention_mask=bias)
    holder = nn.ModuleList([attention])
    optimize_(holder)
    with Calls() as calls, torch.no_grad():
        torch.testing.assert_close(attention(x, attention_mask=bias), expected)
    assert calls.names["sdpa"] == 1


def test_pipelines():
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    pipe = DDPMPipeline(unet, DDPMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def images() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        made = pipe(generator=generator, num_inference_steps=2, output_type="np").images
        return torch.as_tensor(made)

    expected = images()
    report = cudnn_ops.optimize_(pipe)
    assert report.model is pipe
    assert report.diffusers
    assert str(report.diffusers[0]) in str(report)
    assert str(report.diffusers[0]).startswith("unet")
    with Calls() as calls:
        torch.testing.assert_close(images(), expected)
    assert calls.names["group_norm"]


def test_a_pipeline_with_a_text_encoder():
    config = hf.CLIPTextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=16,
        eos_token_id=49,
        bos_token_id=48,
    )
    pipe = StableDiffusionPipeline(
        vae=make("vae"),
        text_encoder=hf.CLIPTextModel(config).eval(),
        tokenizer=None,
        unet=make("unet"),
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    ids = torch.arange(14).view(2, 7)
    positive, negative = draw(1, 7, 16), draw(1, 7, 16)

    def results_of_pipe() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            embedded = pipe.text_encoder(ids)[0]
        images = pipe(
            prompt_embeds=positive,
            negative_prompt_embeds=negative,
            height=16,
            width=16,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="pt",
        ).images
        return embedded, images

    expected = results_of_pipe()
    report = cudnn_ops.optimize_(pipe)
    assert report.attention
    assert any(one.name.startswith("text_encoder.") for one in report.replaced)
    prefixes = {one.name.partition(".")[0] for one in report.diffusers}
    assert prefixes == {"unet", "vae"}
    with Calls() as calls:
        torch.testing.assert_close(results_of_pipe(), expected, rtol=1e-3, atol=1e-4)
    assert calls.names["group_norm"]


def test_copies_are_their_own():
    model = optimized(make("dit"))
    other = copy.deepcopy(model)
    block = other.transformer_blocks[0]
    assert block.forward.__self__ is block
    nn.init.zeros_(other.proj_out_2.weight)
    with torch.no_grad():
        expected = make("dit")(**make_inputs("dit")).sample
        torch.testing.assert_close(model(**make_inputs("dit")).sample, expected)
        assert not torch.equal(other(**make_inputs("dit")).sample, expected)


@pytest.mark.parametrize("name", ["unet", "dit", "sd3", "flux"])
def test_gradient_checkpointing(name):
    model, inputs = optimized(make(name)), make_inputs(name)
    expected = results(model, inputs)
    # Training mode, which checkpointing asks for, would drop labels.
    dropping = [m for m in model.modules() if hasattr(m, "dropout_prob")]
    for module in dropping:
        module.dropout_prob = 0.0
    expected = {key: value.clone() for key, value in expected.items()}
    model.train().enable_gradient_checkpointing()
    found = results(model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_call_for_all_models():
    model = make("dit")
    report = cudnn_ops.optimize_(model)
    assert report.model is model
    assert len(report.diffusers) == len(optimize_(make("dit")).changed)
    assert not report.notes


def test_no_model():
    with pytest.raises(
        TypeError, match=r"must be a torch.nn.Module or a DiffusionPipeline, got int"
    ):
        optimize_(3)
