"""The pattern of group norms: every spelling that models have, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_ops.compiler.pattern import Refusal
from cudnn_ops.compiler.patterns.group_norm import GroupNorm
from cudnn_ops.ops.group_norm import NormActivation
from tests.cases.compiler import Rewritten, check_swap

C, GROUPS, EPS = 12, 3, 1e-3
MODULE = nn.GroupNorm(GROUPS, C, EPS)


def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, w, b, EPS)


def keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(input=x, num_groups=GROUPS, bias=b, weight=w, eps=EPS)


def some_keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, GROUPS, w, eps=EPS, bias=b)


def of_torch(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.group_norm(x, GROUPS, w, b, EPS, torch.backends.cudnn.enabled)


def of_torch_keywords(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.group_norm(x, num_groups=GROUPS, weight=w, bias=b, eps=EPS, cudnn_enabled=False)


def native(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    samples, channels, *positions = x.shape
    count = positions[0] * positions[1]
    return torch.native_group_norm(x, w, b, samples, channels, count, GROUPS, EPS)[0]


def module(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.func.functional_call(MODULE, {"weight": w, "bias": b}, x)


def widened(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x.double(), GROUPS, w.double(), b.double(), EPS).to(x.dtype)


def widened_by_type(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    norm = F.group_norm(x.to(torch.float64), GROUPS, w.type(torch.float64), b.double(), EPS)
    return norm.type_as(x)


SPELLINGS = [
    function,
    keywords,
    some_keywords,
    of_torch,
    of_torch_keywords,
    native,
    module,
    widened,
    widened_by_type,
]


def _in_place(x: Tensor) -> Tensor:
    """As the autoencoders of Chameleon, Emu3 and Janus."""
    x *= torch.sigmoid(x)
    return x


SILUS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": F.silu,
    "in place": lambda x: F.silu(x, inplace=True),
    "module": nn.SiLU(),
    "module in place": nn.SiLU(inplace=True),
    "sigmoid": lambda x: x * torch.sigmoid(x),
    "sigmoid first": lambda x: x.sigmoid().mul(x),
    "sigmoid in place": _in_place,
    "quotient": lambda x: x / (1 + torch.exp(-x)),
    "widened": lambda x: F.silu(x.double()).to(x.dtype),
}


def _inputs(*positions: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, C, *(positions or (5, 4)), dtype=dtype) + 0.3
    w, b = (torch.randn(C, dtype=dtype) for _ in range(2))
    return x, w, b


def _check_ours(
    found: Rewritten, activation: NormActivation = "none", *, added: bool = False
) -> None:
    (ours,) = found.ours
    name = "add_group_norm" if added else "group_norm"
    assert str(ours.target) == f"cudnn_ops.{name}.default"
    assert ours.kwargs == {"activation": activation}


@pytest.mark.parametrize("norm", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings(norm):
    dtype = torch.float32 if "widened" in norm.__name__ else torch.float64
    found = check_swap(norm, *_inputs(dtype=dtype), expect=["group_norm"])
    _check_ours(found)
    casts = [node for node in found.graphs[0].graph.nodes if node.op == "call_method"]
    assert casts == []


@pytest.mark.parametrize("norm", SPELLINGS, ids=lambda f: f.__name__)
def test_spellings_of_a_sum_with_silu(norm):
    def block(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x = x + y
        return F.silu(norm(x, w, b)), x * 2

    dtype = torch.float32 if "widened" in norm.__name__ else torch.float64
    x, w, b = _inputs(dtype=dtype)
    found = check_swap(block, x, torch.randn_like(x), w, b, expect=["group_norm"])
    _check_ours(found, "silu", added=True)


@pytest.mark.parametrize("silu", SILUS)
@pytest.mark.parametrize("norm", [function, native, widened], ids=lambda f: f.__name__)
def test_silus(norm, silu):
    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return SILUS[silu](norm(x, w, b))

    found = check_swap(block, *_inputs(dtype=torch.float32), expect=["group_norm"])
    _check_ours(found, "silu")


def test_silu_before_the_result_is_narrowed():
    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.group_norm(x.double(), GROUPS, w.double(), b.double(), EPS)).to(x.dtype)

    _check_ours(check_swap(block, *_inputs(dtype=torch.float32), expect=["group_norm"]), "silu")


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_without_weight_or_bias(has_weight, has_bias, added):
    def block(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        x = x + y if added else x
        out = F.group_norm(x, GROUPS, w if has_weight else None, b if has_bias else None, EPS)
        return F.silu(out) + y + w.sum() + b.sum()

    x, w, b = _inputs()
    inputs = x, torch.randn_like(x), w, b
    gradients = has_weight or not has_bias  # torch's derivative of a bias alone raises
    found = check_swap(block, *inputs, expect=["group_norm"], gradients=gradients)
    _check_ours(found, "silu", added=added)


@pytest.mark.parametrize("groups", [1, C])
@pytest.mark.parametrize("positions", [(7,), (4, 3), (3, 2, 2)])
def test_groups_and_dimensions(groups, positions):
    """One group is a layer norm of each sample (timm's ``GroupNorm1``)."""

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, groups, w, b))

    _check_ours(check_swap(block, *_inputs(*positions), expect=["group_norm"]), "silu")


def test_both_memory_formats():
    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return function(x, w, b).sin()

    x, w, b = _inputs()
    for each in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3)):
        found = check_swap(block, each, w, b, expect=["group_norm"])
        assert found(each, w, b).stride() == block(each, w, b).stride()


def test_dynamic_sizes():
    def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.silu(native(x, w, b))

    check_swap(function, *_inputs(), expect=["group_norm"], dynamic=True)
    check_swap(activated, *_inputs(), expect=["group_norm"], dynamic=True)


def test_autocast():
    """That of CPUs leaves a group norm in its dtype."""

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.silu(function(x, w, b))

    _check_ours(check_swap(block, *_inputs(dtype=torch.float32), expect=["group_norm"]), "silu")


def test_half_precision():
    """As models write it that norm in float32."""

    def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        out = F.group_norm(x.float(), GROUPS, w.float(), b.float(), EPS).to(x.dtype)
        return F.silu(out)

    inputs = _inputs(dtype=torch.bfloat16)
    found = check_swap(block, *inputs, expect=["group_norm"], tolerance=2e-2, gradients=False)
    _check_ours(found, "silu")


# Modules as libraries write them.


class Activated(nn.GroupNorm):
    """As timm's ``GroupNormAct``."""

    def __init__(self) -> None:
        super().__init__(GROUPS, C, EPS)
        self.drop, self.act = nn.Identity(), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        x = self.drop(x)
        return self.act(x)


class ResnetBlock(nn.Module):
    """As diffusers' ``ResnetBlock2D``: the shift of the time is no residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, C, EPS), nn.GroupNorm(GROUPS, C, EPS)
        self.conv1, self.conv2 = (nn.Conv2d(C, C, 3, padding=1) for _ in range(2))
        self.time_emb_proj = nn.Linear(8, C)
        self.nonlinearity, self.dropout = nn.SiLU(), nn.Dropout(0.0)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        hidden = self.norm1(x)
        hidden = self.nonlinearity(hidden)
        hidden = self.conv1(hidden)
        temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        hidden = hidden + temb
        hidden = self.norm2(hidden)
        hidden = self.nonlinearity(hidden)
        hidden = self.conv2(self.dropout(hidden))
        return (x + hidden) / 1.0


def test_a_norm_with_its_activation():
    norm = Activated().double()
    nn.init.normal_(norm.weight)
    _check_ours(check_swap(lambda x: norm(x), _inputs()[0], expect=["group_norm"]), "silu")


def test_a_residual_block_of_diffusion():
    block = ResnetBlock().double()
    x, temb = _inputs()[0], torch.randn(2, 8).double()
    only = ["group_norm"]
    found = check_swap(lambda *inputs: block(*inputs), x, temb, expect=only * 2, swap=only)
    assert [str(node.target) for node in found.ours] == ["cudnn_ops.group_norm.default"] * 2
    assert all(node.kwargs == {"activation": "silu"} for node in found.ours)


def test_blocks_in_a_row():
    """The sum of one block is what the next one norms, and its residual."""
    block = ResnetBlock().double()
    x, temb = _inputs()[0], torch.randn(2, 8).double()

    def blocks(x: Tensor, temb: Tensor) -> Tensor:
        for _ in range(2):
            x = x + block.conv1(F.silu(block.norm1(x)))
        return x

    found = check_swap(blocks, x, temb, expect=["group_norm"] * 2, swap=["group_norm"])
    names = [str(node.target).split(".")[1] for node in found.ours]
    assert names == ["group_norm", "add_group_norm"]


# What only looks like one: what legitimately remains is the norm itself.


def _gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(function(x, w, b))


def _quick_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    return x * torch.sigmoid(1.702 * x)


def _mish(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.mish(function(x, w, b))


def _other_quotient(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    return x / (2 + torch.exp(-x))


def _gate_of_the_input(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x, w, b) * torch.sigmoid(x)


def _scaled_in_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A scale and a shift of the time, as diffusers' ``"scale_shift"``."""
    return F.silu(function(x, w, b) * (1 + w[:, None, None]) + b[:, None, None])


def _dropped_in_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.dropout(function(x, w, b), 1.0, True))


def _used_elsewhere(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    return F.silu(x) + x.flip(1)


def _other_factor(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    gate = torch.sigmoid(x)
    return x.add(1) * gate


NEAR_MISSES = [
    _gelu,
    _quick_gelu,
    _mish,
    _other_quotient,
    _gate_of_the_input,
    _scaled_in_between,
    _dropped_in_between,
    _used_elsewhere,
    _other_factor,
]


def _overwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The gate is of what the norm was, and is multiplied with what became of it."""
    x = function(x, w, b)
    gate = torch.sigmoid(x)
    x.add_(1)
    return x * gate


def _read_before_it_is_overwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    first = x.flip(1)
    return _in_place(x) + first


def _view_of_what_is_overwritten(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    first = x[:1]
    return _in_place(x) + first


def _overwritten_again(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = function(x, w, b)
    activated = _in_place(x)
    activated.add_(1)
    return x * 2


@pytest.mark.parametrize(
    "near_miss",
    [
        *(_overwritten, _read_before_it_is_overwritten),
        *(_view_of_what_is_overwritten, _overwritten_again),
    ],
    ids=lambda f: f.__name__,
)
def test_writes_to_a_norm(near_miss):
    found = check_swap(near_miss, *_inputs(), expect=[], swap=["group_norm"], gradients=False)
    assert all(
        "changed in place" in one.reason or "elsewhere" in one.reason
        for one in found.report.candidates
    )


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_like_silu_of_a_norm(near_miss):
    found = check_swap(near_miss, *_inputs(), expect=["group_norm"], swap=["group_norm"])
    _check_ours(found)


def _of_other_groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x, w, b) * torch.sigmoid(F.group_norm(x, 2, w, b, EPS))


def _of_another_eps(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x, w, b) * torch.sigmoid(F.group_norm(x, GROUPS, w, b, 10 * EPS))


def _of_another_weight(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x, w, b) * torch.sigmoid(F.group_norm(x, GROUPS, None, None, EPS)) + b.sum()


@pytest.mark.parametrize(
    "near_miss",
    [_of_other_groups, _of_another_eps, _of_another_weight],
    ids=lambda f: f.__name__,
)
def test_a_gate_by_another_norm(near_miss):
    only = ["group_norm"]
    found = check_swap(near_miss, *_inputs(), expect=only * 2, swap=only)
    assert all(node.kwargs == {"activation": "none"} for node in found.ours)


def _shift_of_the_time(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x + y.mean((2, 3))[:, :, None, None], w, b)


def _broadcast_to_more(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x[:1] + y, w, b)


def _scaled_sum(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(torch.add(x, y, alpha=2), w, b)


def _difference(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x - y, w, b)


def _sum_with_a_number(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x + 1, w, b) + y


def _of_two_dtypes(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return function(x + y.float(), w, b)


def _weight_of_the_sum(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """It is used before its norm can be computed."""
    x = x + y
    return function(x, x.mean((0, 2, 3)).sin(), b)


@pytest.mark.parametrize(
    "near_miss",
    [
        *(_shift_of_the_time, _broadcast_to_more, _scaled_sum, _difference),
        *(_sum_with_a_number, _of_two_dtypes, _weight_of_the_sum),
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_a_residual(near_miss):
    x, w, b = _inputs()
    found = check_swap(near_miss, x, torch.randn_like(x), w, b, expect=["group_norm"])
    _check_ours(found)


def _batch_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.batch_norm(x, None, None, w, b, training=True))


def _instance_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.instance_norm(x, None, None, w, b))


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.layer_norm(x, x.shape[1:])) * w[:, None, None] + b[:, None, None]


def _native_of_other_sizes(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Groups of the channels of both samples."""
    out = torch.native_group_norm(x, None, None, 1, 2 * C, 20, 4, EPS)[0]
    return out + w.sum() + b.sum()


def _native_statistics(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.native_group_norm(x, w, b, 2, C, 20, GROUPS, EPS)[1]


def _native_with_statistics(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    out, mean, _ = torch.native_group_norm(x, w, b, 2, C, 20, GROUPS, EPS)
    return out, mean


def _changed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    x = x * 1.5
    out = function(x, w, b)
    x.mul_(2)
    return F.silu(out) + x


@pytest.mark.parametrize(
    "near_miss",
    [
        *(_batch_norm, _instance_norm, _layer_norm),
        *(_native_of_other_sizes, _native_statistics, _native_with_statistics, _changed),
    ],
    ids=lambda f: f.__name__,
)
def test_what_only_looks_like_a_group_norm(near_miss):
    gradients = near_miss is not _changed  # which autograd refuses
    check_swap(near_miss, *_inputs(), expect=[], swap=["group_norm"], gradients=gradients)


def test_a_norm_across_a_change_of_gradients():
    def half(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(function(x, w, b))
        return function(x, w, b) * gate

    found = check_swap(half, *_inputs(), expect=["group_norm"] * 2, swap=["group_norm"])
    assert all(node.kwargs == {"activation": "none"} for node in found.ours)


def test_doubles_on_a_gpu():
    graph = fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(F.group_norm, (x, GROUPS))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in (x, norm):
            node.meta["example_value"] = torch.empty(2, C, 5, dtype=torch.float64, device="cuda")
    with pytest.raises(Refusal, match="on a GPU group norm supports"):
        list(GroupNorm().find(norm))
