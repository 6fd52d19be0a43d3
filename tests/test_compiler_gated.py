"""The pattern of gated activations: every spelling that models have, and near-misses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code

from tests.cases.compiler import check_swap


def llama(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def phi3(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = torch.cat([gate, up], -1).chunk(2, dim=-1)
    return up * torch.nn.functional.silu(gate)


def halves(gate: Tensor, up: Tensor) -> Tensor:
    both = torch.cat([gate, up], -1)
    size = gate.shape[-1]
    return F.silu(both[..., :size]) * both[..., size:]


def of_stacked(gate: Tensor, up: Tensor) -> Tensor:
    both = torch.stack([gate, up], -2)
    return F.silu(both[..., 0, :]) * both[..., 1, :]


def swish_written_out(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def swish_by_method(gate: Tensor, up: Tensor) -> Tensor:
    return up.mul(gate.sigmoid().mul(gate))


def swish_by_exponent(gate: Tensor, up: Tensor) -> Tensor:
    return up * (gate / (1 + torch.exp(-gate)))


def silu_in_place(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate * 2, inplace=True) * up


def product_in_place(gate: Tensor, up: Tensor) -> Tensor:
    hidden = F.silu(gate)
    hidden *= up
    return hidden


def geglu_of_diffusers(gate: Tensor, up: Tensor) -> Tensor:
    hidden, gate = torch.cat([up, gate], -1).chunk(2, dim=-1)
    return hidden * F.gelu(gate)


def modernbert(gate: Tensor, up: Tensor) -> Tensor:
    return F.dropout(F.gelu(gate) * up, 0.1, False)


def gemma(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def gelu_new(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up


def gelu_accurate(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3))
    return up * (0.5 * gate * (1 + torch.tanh(inner)))


def gelu_fast(gate: Tensor, up: Tensor) -> Tensor:
    inner = gate * 0.7978845608 * (1.0 + 0.044715 * gate * gate)
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up


def gelu_by_products(gate: Tensor, up: Tensor) -> Tensor:
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate * (0.5 * (1 + inner.tanh())) * up


def gelu_by_erf(gate: Tensor, up: Tensor) -> Tensor:
    return gate * 0.5 * (1.0 + torch.erf(gate / math.sqrt(2.0))) * up


def gelu_by_erf_times(gate: Tensor, up: Tensor) -> Tensor:
    return up * (0.5 * (gate * (1.0 + torch.erf(gate * 0.7071067811865476))))


SPELLINGS = [
    *(llama, phi3, halves, of_stacked, swish_written_out, swish_by_method, swish_by_exponent),
    *(silu_in_place, product_in_place, geglu_of_diffusers, modernbert, gemma, gelu_new),
    *(gelu_accurate, gelu_fast, gelu_by_products, gelu_by_erf, gelu_by_erf_times),
]


def _inputs(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape or (3, 5, 24), dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("gated", SPELLINGS, ids=lambda f: f.__name__)
def test_gated(gated):
    found = check_swap(gated, *_inputs(), expect=["gated"])
    op = "swiglu" if "silu" in gated.__code__.co_names or "swish" in gated.__name__ else "geglu"
    assert [str(node.target) for node in found.ours] == [f"cudnn_ops.{op}.default"]


def test_gate_in_float32():
    """Computed in float32 and rounded in between, or at the end."""

    def between(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.float()).to(gate.dtype) * up

    def behind(gate: Tensor, up: Tensor) -> Tensor:
        return (F.silu(gate.float()) * up.float()).to(gate.dtype)

    for block in (between, behind):
        found = check_swap(block, *_inputs(dtype=torch.bfloat16), expect=["gated"], tolerance=3e-2)
        names = [node.target for node in found.graphs[0].graph.nodes if node.op == "call_method"]
        assert names == []


def test_up_in_float32_makes_the_result_one():
    def block(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate.float()) * up

    gate, up = _inputs(dtype=torch.float32)
    found = check_swap(block, gate.bfloat16(), up, expect=["gated"], tolerance=1e-2)
    assert found.ours[0].meta["example_value"].dtype == torch.float32


def test_two_gates():
    """Both factors are activated: one of them is the other's up."""

    def block(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * F.gelu(up)

    found = check_swap(block, *_inputs(), expect=["gated"])
    assert len(found.ours) == 1


def test_odd_and_empty_sizes():
    for shape in ((1,), (7, 3), (0, 4), (2, 3, 5, 7)):
        check_swap(llama, *_inputs(*shape), expect=["gated"])


def test_dynamic_sizes():
    check_swap(llama, *_inputs(), expect=["gated"], dynamic=True)
    check_swap(phi3, *_inputs(), expect=["gated"], dynamic=True)


def test_large_and_small_numbers():
    for factor in (1e-8, 1e4):
        check_swap(llama, *(factor * x for x in _inputs()), expect=["gated"])


def _of_results(gate: Tensor, up: Tensor) -> Tensor:
    return llama(gate * 2, up + 1)


def _geglu_of_results(gate: Tensor, up: Tensor) -> Tensor:
    return modernbert(gate @ gate.mT, up @ up.mT)


def _tanh_geglu_of_results(gate: Tensor, up: Tensor) -> Tensor:
    return gemma(gate * 2, up)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("block", [_of_results, _geglu_of_results, _tanh_geglu_of_results])
def test_in_the_place_of_the_gate(block, dynamic):
    """Where nothing else reads the gate, now or for a gradient."""
    inputs = _inputs(dtype=torch.float32)
    options = {"expect": ["gated"], "dynamic": dynamic}
    for gradients in (False, True):
        found = check_swap(block, *inputs, gradients=gradients, **options)
        is_in_place = str(found.ours[0].target) == "cudnn_ops._gated_.default"
        assert is_in_place == (not gradients)


def test_inductor_needs_no_memory_for_it():
    gate, up = _inputs(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(_of_results, backend="cudnn_ops", options={"swap": ["gated"]})
    found, (code,) = run_and_get_code(compiled, gate, up)
    torch.testing.assert_close(found, _of_results(gate, up))
    assert "cudnn_ops__gated_(" in code
    assert code[code.index("def call") :].count("= empty_strided_cpu(") == 2


def _into_norms(gate: Tensor, up: Tensor) -> Tensor:
    hidden = llama(gate, up)
    return F.layer_norm(hidden, hidden.shape[-1:]) * F.rms_norm(hidden, hidden.shape[-1:])


def _into_a_norm_past_dropout(gate: Tensor, up: Tensor) -> Tensor:
    hidden = F.dropout(llama(gate, up), 0.0)
    return F.layer_norm(hidden, hidden.shape[-1:])


def _into_a_norm_and_more(gate: Tensor, up: Tensor) -> Tensor:
    hidden = llama(gate, up)
    return F.layer_norm(hidden, hidden.shape[-1:]) * (hidden @ hidden.mT).mean()


@pytest.mark.parametrize(
    ("block", "is_kept"),
    [(_into_norms, False), (_into_a_norm_past_dropout, False), (_into_a_norm_and_more, True)],
)
def test_computed_again_for_norms(block, is_kept):
    """For its own gradient it keeps gate and up, and for a norm's alone it would be one more."""
    options = {"swap": ["gated", "layer_norm", "rms_norm"]}
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="cudnn_ops", options=options)
    inputs = [tensor.requires_grad_() for tensor in _inputs()]
    _, codes = run_fw_bw_and_get_code(lambda: compiled(*inputs))
    assert ["cudnn_ops__gated(" in code for code in codes] == [True, not is_kept]
    grads = torch.autograd.grad(block(*inputs).sum(), inputs)
    torch.testing.assert_close([x.grad for x in inputs], list(grads))


def test_strides_are_those_of_the_stock_graph():
    """Of a product with something transposed, torch's result is transposed, and ours is not."""

    def viewed(gate: Tensor, up: Tensor) -> Tensor:
        return (up.mT * F.silu(gate * 2)).mT.view(3, -1)

    def returned(gate: Tensor, up: Tensor) -> Tensor:
        return up.mT * F.silu(gate * 2)

    inputs = torch.randn(3, 5, 7), torch.randn(3, 7, 5)
    for block in (viewed, returned):
        check_swap(block, *inputs, expect=["gated"], gradients=False)
        torch._dynamo.reset()
        compiled = torch.compile(block, backend="cudnn_ops", options={"swap": ["gated"]})
        assert compiled(*inputs).stride() == block(*inputs).stride()


def test_a_gate_that_a_gradient_needs():
    """Also where the other factor has other strides, and the result is therefore looked at anew."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return llama(x.detach() * 2, F.conv2d(x, weight, padding=1))

    x, weight = torch.randn(2, 4, 8, 6).double(), torch.randn(4, 4, 3, 3).double()
    names = ["gated", "convolution"]
    for gradients in (False, True):
        found = check_swap(block, x, weight, expect=names, swap=names, gradients=gradients)
        is_in_place = "cudnn_ops._gated_.default" in [str(node.target) for node in found.ours]
        assert is_in_place == (not gradients)


def test_beside_a_models_own_calls():
    """With names, or for each sample: they stay, and the match beside them is swapped."""
    swiglu = torch.ops.cudnn_ops.swiglu.default

    def named(gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate=gate * 2, up=up) + _of_results(gate, up)

    def each_sample(gate: Tensor, up: Tensor) -> Tensor:
        return torch.vmap(lambda gate, up: swiglu(gate * 2, up))(gate, up) + _of_results(gate, up)

    for block in (named, each_sample):
        check_swap(block, *_inputs(dtype=torch.float32), expect=["gated"], gradients=False)


def _of_an_input(gate: Tensor, up: Tensor) -> Tensor:
    return llama(gate, up * 2)


def _of_a_view(gate: Tensor, up: Tensor) -> Tensor:
    return llama(gate.view(-1), up.view(-1))


def _of_halves(gate: Tensor, up: Tensor) -> Tensor:
    return halves(gate * 2, up)


def _read_elsewhere(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    doubled = gate * 2
    return llama(doubled, up), doubled + 1


def _returned(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    doubled = gate * 2
    return llama(doubled, up), doubled


def _with_a_view_elsewhere(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    doubled = gate * 2
    row = doubled[0]
    return llama(doubled, up), row


def _of_transposed(gate: Tensor, up: Tensor) -> Tensor:
    return llama((gate.mT * 2), up.mT)


@pytest.mark.parametrize(
    "block",
    [
        *(_of_an_input, _of_a_view, _of_halves, _read_elsewhere, _returned),
        *(_with_a_view_elsewhere, _of_transposed),
    ],
)
def test_not_in_place_of_what_is_somebody_elses(block):
    found = check_swap(block, *_inputs(dtype=torch.float32), expect=["gated"], gradients=False)
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.swiglu.default"]


def _relu(gate: Tensor, up: Tensor) -> Tensor:
    return F.relu(gate) * up


def _sigmoid(gate: Tensor, up: Tensor) -> Tensor:
    return torch.sigmoid(gate) * up


def _quick_gelu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(1.702 * gate) * up


def _sigmoid_of_another(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(up) * up


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _mish(gate: Tensor, up: Tensor) -> Tensor:
    return F.mish(gate) * up


def _other_third(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.0447 * torch.pow(gate, 3))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def _other_scale(gate: Tensor, up: Tensor) -> Tensor:
    inner = 0.79788 * (gate + 0.044715 * torch.pow(gate, 3))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def _square(gate: Tensor, up: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * torch.pow(gate, 2))
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def _not_halved(gate: Tensor, up: Tensor) -> Tensor:
    return gate * (1.0 + torch.erf(gate / math.sqrt(2.0))) * up


def _other_root(gate: Tensor, up: Tensor) -> Tensor:
    return 0.5 * gate * (1.0 + torch.erf(gate / 1.4)) * up


def _scaled_sum(gate: Tensor, up: Tensor) -> Tensor:
    normal = torch.erf(gate / math.sqrt(2.0))
    return 0.5 * gate * torch.add(normal, 1, alpha=2) * up


def _by_itself(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * gate + up


def _row(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate[:, :1]) * up


def _column(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up[..., :1]


def _number(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * 2.0 + up


def _used_elsewhere(gate: Tensor, up: Tensor) -> Tensor:
    hidden = F.silu(gate)
    return hidden * up + hidden


def _changed(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate * 1.5
    hidden = F.silu(gate)
    gate.mul_(2)
    return hidden * up + gate


def _changed_through_a_view(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate * 1.5
    hidden = F.silu(gate)
    gate.view(-1)[0] = 0.0
    return hidden * up + gate


def _rounded(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).to(torch.int32).to(gate.dtype) * up


NEAR_MISSES = [
    *(_relu, _sigmoid, _quick_gelu, _sigmoid_of_another, _gpt_oss, _mish, _other_third),
    *(_other_scale, _square, _not_halved, _other_root, _scaled_sum, _by_itself, _row, _column),
    *(_number, _used_elsewhere, _changed, _changed_through_a_view, _rounded),
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_gated(near_miss):
    gradients = near_miss not in (_changed, _changed_through_a_view)  # which autograd refuses
    check_swap(near_miss, *_inputs(), expect=[], gradients=gradients)


def test_gate_and_up_swapped_is_another_computation():
    """What is activated is the gate, on whichever side of the product it is."""

    def block(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(up) * gate

    gate, up = _inputs()
    found = check_swap(block, gate, up, expect=["gated"])
    first, second = found.ours[0].args[:2]
    assert ["up" in str(first), "gate" in str(second)] == [True, True]


def test_experts_that_add_to_a_result_in_place():
    """What is written to is another memory than what the gate is computed of."""

    def block(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.zeros_like(gate)
        for tokens in (torch.tensor([0, 2]), torch.tensor([1, 2])):
            hidden = F.silu(gate[tokens]) * up[tokens]
            out.index_add_(0, tokens, hidden.to(out.dtype))
        return out

    check_swap(block, *_inputs(), expect=["gated"] * 2)


def test_a_gate_across_a_change_of_gradients():
    def block(gate: Tensor, up: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = F.silu(gate)
        return hidden * up

    found = check_swap(block, *_inputs(), expect=[])
    assert "switched on or off" in found.report.candidates[0].reason
