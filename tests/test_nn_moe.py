"""Mixtures of experts as modules: against transformers' on random weights, and in its models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.mixtral.modeling_mixtral import (
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import cudnn_ops
from cudnn_ops.nn import Experts, MoE, replace_modules_
from tests.cases import models, sdpa
from tests.cases.families import tiny_config, tiny_model
from tests.conftest import DEVICES

EXPERTS, TOP_K, DIM, HIDDEN = 8, 3, 32, 24
#: Of each family its block, what its configuration has beside the sizes, and ours.
FAMILIES: dict[str, tuple[type[nn.Module], str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": (MixtralSparseMoeBlock, "mixtral", {}, {}),
    "qwen2": (
        Qwen2MoeSparseMoeBlock,
        "qwen2_moe",
        {"norm_topk_prob": False, "shared_expert_intermediate_size": 40},
        {"normalize": False, "shared_hidden": 40, "shared_gate": True},
    ),
    "qwen2_normalized": (
        Qwen2MoeSparseMoeBlock,
        "qwen2_moe",
        {"norm_topk_prob": True, "shared_expert_intermediate_size": 40},
        {"shared_hidden": 40, "shared_gate": True},
    ),
    "qwen3": (Qwen3MoeSparseMoeBlock, "qwen3_moe", {"norm_topk_prob": True}, {}),
    "olmoe": (
        OlmoeSparseMoeBlock,
        "olmoe",
        {"norm_topk_prob": False},
        {"normalize": False},
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        "deepseek_v3",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2},
        {
            **{"score": "sigmoid", "scale": 2.5, "num_groups": 4, "top_groups": 2},
            **{"correction_bias": True, "in_float32": True, "shared_hidden": 2 * HIDDEN},
        },
    ),
    "glm4": (
        Glm4MoeMoE,
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 1},
        {
            **{"score": "sigmoid", "scale": 1.5, "shared_hidden": HIDDEN},
            **{"correction_bias": True, "in_float32": True},
        },
    ),
}


def blocks(name: str, device: str, dtype: torch.dtype) -> tuple[nn.Module, MoE]:
    """Theirs with random parameters, and ours with the same."""
    block, family, options, ours = FAMILIES[name]
    config = tiny_config(family)
    sizes = {
        **{"hidden_size": DIM, "num_experts_per_tok": TOP_K, "moe_intermediate_size": HIDDEN},
        **{"intermediate_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS},
        "n_routed_experts": EXPERTS,
    }
    for key, value in {**sizes, **options}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config._experts_implementation = "eager"
    theirs = block(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in theirs.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.copy_(values * (0.3 if "bias" in key else tensor.shape[-1] ** -0.5))
    theirs = theirs.to(device, dtype)
    module = MoE(DIM, HIDDEN, EXPERTS, TOP_K, device=device, dtype=dtype, **ours)
    module.load_state_dict(theirs.state_dict())
    return theirs, module


def run(module: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The result, and the gradients by the names of the parameters."""
    leaf = x.detach().requires_grad_()
    out = module(leaf)
    parameters = dict(module.named_parameters())
    wanted = [leaf, *parameters.values()]
    grads = torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
    names = ("input", *(name.replace("shared_experts", "shared_expert") for name in parameters))
    return {"out": out, **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_transformers(name, device):
    """Forward and gradients, of all parameters."""
    theirs, ours = blocks(name, device, torch.float32)
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(2, 19, DIM, generator=generator).to(device) for _ in range(2))
    exact = run(copy.deepcopy(theirs).double(), x.double(), grad.double())
    rough, found = run(theirs, x, grad), run(ours, x, grad)
    assert exact.keys() == found.keys()
    for key, mine in found.items():
        sdpa.check(mine, exact[key], rough[key], f"{name} {key}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name, device):
    """With the experts that the router chose, which rounding decides on."""
    theirs, ours = blocks(name, device, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, DIM, generator=generator).to(device, torch.bfloat16)
    _, weights, chosen = ours.gate(x)
    experts = copy.deepcopy(theirs.experts)
    exact = experts.double()(x.double(), chosen, weights.double())
    rough = theirs.experts(x, chosen, weights)
    sdpa.check(ours.experts(x, chosen, weights), exact, rough, name)


def old_state(state: dict[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """A key for each expert, as checkpoints on disk have them."""
    gate, up, down = names
    result = {}
    for key, tensor in state.items():
        prefix, _, name = key.rpartition(".")
        for expert in range(EXPERTS if prefix == "experts" else 0):
            of_expert = f"experts.{expert}"
            if name == "down_proj":
                result[f"{of_expert}.{down}.weight"] = tensor[expert]
            else:
                halves = tensor[expert].chunk(2)
                result[f"{of_expert}.{gate}.weight"], result[f"{of_expert}.{up}.weight"] = halves
        if prefix != "experts":
            result[key] = tensor
    return result


@pytest.mark.parametrize(
    "names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")], ids=str
)
def test_checkpoints_with_a_key_for_each_expert(names):
    theirs, ours = blocks("mixtral", "cpu", torch.float32)
    state = old_state(theirs.state_dict(), names)
    other = nn.ModuleDict({"layer": MoE(DIM, HIDDEN, EXPERTS, TOP_K)})
    other.load_state_dict({f"layer.{key}": value for key, value in state.items()})
    for mine, right in zip(other.parameters(), ours.parameters(), strict=True):
        assert torch.equal(mine, right)
    del state[f"experts.5.{names[1]}.weight"]
    with pytest.raises(ValueError, match=f"8 experts, and the state has no experts.5.{names[1]}"):
        MoE(DIM, HIDDEN, EXPERTS, TOP_K).load_state_dict(state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"]
)
def test_experts_of_a_model_are_replaced(family, experts, device):
    """By what they compute, however transformers runs them; parameters stay what they are."""
    stock = tiny_model(family).to(device)
    model = copy.deepcopy(stock)
    model.set_experts_implementation(experts)
    before = dict(model.named_parameters())
    replaced = {each.name: each.new for each in replace_modules_(model)}
    mine = [name for name, new in replaced.items() if isinstance(new, Experts)]
    theirs = [n for n, module in stock.named_modules() if type(module).__name__.endswith("Experts")]
    assert mine == theirs
    assert mine
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    tokens = models.make_tokens(device)
    results = []
    for each in (model, stock):
        logits = each(tokens).logits
        generator = torch.Generator().manual_seed(9)
        logits.backward(torch.randn(logits.shape, generator=generator).to(logits))
        grads = {n: p.grad for n, p in each.named_parameters() if p.grad is not None}
        results.append((logits, grads))
    (found, mine_grads), (right, their_grads) = results
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert mine_grads.keys() == their_grads.keys()
    scale = max(grad.norm() for grad in their_grads.values())
    for name, grad in their_grads.items():
        assert (mine_grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-6 * scale, name


class OtherExperts(nn.Module):
    """Experts of another formula."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        self.formula = formula
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.down_proj = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for token in range(x.shape[0]):
            for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                gate, up = (self.gate_up_proj[expert] @ x[token]).chunk(2)
                if self.formula == "relu":
                    inner = F.relu(gate) * up
                elif self.formula == "swapped":
                    inner = F.silu(up) * gate
                else:
                    inner = F.gelu(gate, approximate="tanh") * up
                out[token] += weight * (self.down_proj[expert] @ inner)
        return out


@pytest.mark.parametrize("formula", ["relu", "swapped", "gelu_tanh"])
def test_what_computes_another_is_left_alone(formula, capsys):
    model = nn.ModuleDict({"experts": OtherExperts(formula)})
    found = replace_modules_(model, dry_run=True)
    if formula == "gelu_tanh":
        assert found[0].new.activation == "gelu_tanh"
    else:
        assert found == []
        assert "OtherExperts is left alone: it is not gate_up_proj" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    torch._dynamo.reset()
    _, ours = blocks("deepseek_v3", device, torch.float32)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    for tokens in (5, 12):
        x = torch.randn(2, tokens, DIM, device=device)
        torch.testing.assert_close(compiled(x), ours(x), rtol=1e-4, atol=1e-4)


def test_shapes_and_logits():
    moe = MoE(DIM, HIDDEN, EXPERTS, TOP_K, shared_hidden=8)
    x = torch.randn(2, 5, DIM)
    out, logits = moe(x, return_logits=True)
    assert torch.equal(out, moe(x))
    assert logits.shape == (10, EXPERTS)
    torch.testing.assert_close(moe(x[0, 0]), out[0, 0])
    assert moe(x[:0]).shape == (0, 5, DIM)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"top_k": 9}, "top_k must be 1 to the number of experts, 8; got 9"),
        ({"top_k": 0}, "top_k must be 1 to the number of experts, 8; got 0"),
        ({"score": "tanh"}, "score must be one of softmax, softmax_of_chosen, sigmoid, got 'tanh'"),
        ({"num_groups": 3}, "num_groups must divide the 8 experts, got 3"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups must be 1 to num_groups, 4; got 5"),
        ({"num_groups": 8, "top_groups": 2}, "2 of 8 groups have 2 experts, and top_k is 3"),
        ({"activation": "relu"}, "activation must be one of silu, gelu, gelu_tanh, got 'relu'"),
        ({"shared_gate": True}, "shared_gate needs shared_hidden"),
    ],
)
def test_mistakes(options, match):
    with pytest.raises(ValueError, match=match):
        MoE(**{"dim": DIM, "hidden": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, **options})


def test_mistakes_of_routing():
    logits = torch.randn(5, 8)
    with pytest.raises(ValueError, match=r"correction_bias must be \[8\], got \[7\]"):
        cudnn_ops.moe_route(logits, 2, correction_bias=torch.zeros(7))
    with pytest.raises(
        ValueError, match="group_best must be 1 to 2, the experts of a group; got 3"
    ):
        cudnn_ops.moe_route(logits, 2, num_groups=4, top_groups=2, group_best=3)
    with pytest.raises(ValueError, match=r"mask must be \[5\], for logits \[5, 8\]; got \[4\]"):
        cudnn_ops.load_balancing_loss(logits, 2, torch.ones(4))
    with pytest.raises(ValueError, match="logits must be of a layer at least"):
        cudnn_ops.load_balancing_loss([], 2)


@pytest.mark.parametrize("device", DEVICES)
def test_the_softmax_of_the_chosen(device):
    """As gpt-oss routes: over the logits that were chosen."""
    logits = torch.randn(50, 8, device=device, dtype=torch.float64, requires_grad=True)
    weights, experts = cudnn_ops.moe_route(logits, 3, score="softmax_of_chosen")
    best, right = logits.topk(3)
    assert torch.equal(experts, right)
    torch.testing.assert_close(weights, best.softmax(-1))
    grad = torch.randn_like(weights)
    found, expected = (
        torch.autograd.grad(out, logits, grad, retain_graph=True)[0]
        for out in (weights, best.softmax(-1))
    )
    torch.testing.assert_close(found, expected)


def test_groups_by_their_best_expert():
    """As DeepSeek-V2 chooses: groups of which one expert is good enough."""
    logits = torch.tensor([[5.0, -5.0, 2.0, 1.9, 1.0, 0.9]])
    _, by_one = cudnn_ops.moe_route(logits, 2, num_groups=3, top_groups=1, group_best=1)
    assert by_one.tolist() == [[0, 1]]
    _, by_two = cudnn_ops.moe_route(
        logits, 2, score="sigmoid", num_groups=3, top_groups=1, group_best=2
    )
    assert by_two.tolist() == [[2, 3]]
    low = torch.full((6,), -9.0)  # by which no score is above 0
    _, biased = cudnn_ops.moe_route(
        logits, 2, score="sigmoid", correction_bias=low, num_groups=3, top_groups=1
    )
    assert biased.tolist() == [[2, 3]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_transformers(masked, device):
    layers = [torch.randn(2 * 7, EXPERTS, device=device, requires_grad=True) for _ in range(3)]
    mask = (torch.rand(2, 7, device=device) < 0.6).long() if masked else None
    results = []
    for dtype in (torch.float32, torch.float64):
        wide = tuple(layer.to(dtype) for layer in layers)
        right = load_balancing_loss_func(wide, EXPERTS, 2, mask)
        results.append([right, *torch.autograd.grad(right, layers)])
    found = cudnn_ops.load_balancing_loss(layers, 2, None if mask is None else mask.flatten())
    mine = [found, *torch.autograd.grad(found, layers)]
    torch.testing.assert_close(mine, results[0], rtol=1e-5, atol=1e-6)
    one = cudnn_ops.load_balancing_loss(layers[0].view(2, 7, EXPERTS), 2, mask)
    torch.testing.assert_close(
        one, load_balancing_loss_func((layers[0],), EXPERTS, 2, mask), rtol=1e-5, atol=1e-6
    )
