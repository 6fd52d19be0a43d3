"""Convolution modules against torch's, and folding what follows a convolution into it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck, ResNet, resnet18, resnet50

import cudnn_ops.nn
from cudnn_ops.nn import ConvAct1d, ConvAct2d, ConvAct3d, fuse_conv_bn_act_
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_tf32")
CONV_ACTS = (ConvAct1d, ConvAct2d, ConvAct3d)
ACTIVATIONS = {
    "none": nn.Identity(),
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "relu6": nn.ReLU6(),
    "hardswish": nn.Hardswish(),
    "leaky_relu": nn.LeakyReLU(),
}


def check(mine, stock, exact, floor=1e-5):
    """At most twice torch's error, and a floor that is rounding's."""
    for x, y, z in zip(mine, stock, exact, strict=True):
        assert x.dtype == y.dtype
        error, theirs = ((value.double() - z).norm() for value in (x, y))
        assert error <= 2 * theirs + floor * z.norm(), f"{error:.3g}, torch's is {theirs:.3g}"


def with_grads(module, inputs, grad_out):
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = module(*inputs)
    of = [*inputs, *module.parameters()]
    return [out, *torch.autograd.grad(out, of, grad_out.to(out.dtype))]


class Stock(nn.Module):
    """``act(conv(x) + residual)`` by torch."""

    def __init__(self, conv, activation):
        super().__init__()
        self.conv, self.act = conv, ACTIVATIONS[activation]

    def forward(self, x, residual):
        return self.act(self.conv(x) + residual)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d"])
def test_convolutions_take_each_others_state(name, device):
    torch.manual_seed(0)
    arguments = (8, 16, 3, 2, 1, 1, 2)
    theirs = getattr(nn, name)(*arguments, device=device)
    ours = getattr(cudnn_ops.nn, name.replace("Conv", "ConvAct"))(*arguments, device=device)
    assert isinstance(ours, getattr(nn, name))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": "same", "dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": "same", "padding_mode": "circular"},
        {"padding": 1, "bias": False},
    ],
    ids=str,
)
def test_results_and_gradients_are_those_of_torch(options, activation, device):
    torch.manual_seed(1)
    for dims, ours in enumerate(CONV_ACTS, 1):
        conv = getattr(nn, f"Conv{dims}d")(8, 16, 3, device=device, **options)
        size = (9, 7, 6)[:dims]
        x = torch.randn(2, 8, *size, device=device)
        residual, grad = (torch.randn(2, 16, *size, device=device) for _ in range(2))
        mine = ours(8, 16, 3, device=device, activation=activation, **options)
        mine.load_state_dict(conv.state_dict())
        stock = Stock(conv, activation)
        exact = copy.deepcopy(stock).double()
        check(
            with_grads(mine, (x, residual), grad),
            with_grads(stock, (x, residual), grad),
            with_grads(exact, (x.double(), residual.double()), grad),
        )


def test_an_activation_that_there_is_not():
    with pytest.raises(ValueError, match=r"activation must be one of none, relu, .*, got 'tanh'"):
        ConvAct2d(8, 8, 1, activation="tanh")
    assert "activation=silu" in repr(ConvAct2d(8, 8, 1, activation="silu"))


def randomize(model):
    """Statistics and parameters that show whatever is forgotten."""
    torch.manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def calls(fused):
    """What is called in a fused model: the ConvActs, and all other modules and functions."""
    ours, others = [], []
    for node in fused.graph.nodes:
        if node.op == "call_module" and isinstance(fused.get_submodule(node.target), CONV_ACTS):
            ours.append(node.target)
        elif node.op.startswith("call_"):
            others.append(node.target)
    return ours, others


def convolutions(model):
    return [n for n, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)]


RESNETS = {
    "basic": resnet18,
    "bottleneck": lambda: ResNet(Bottleneck, [1, 1, 1, 1]),
    "deeper": lambda: ResNet(Bottleneck, [2, 1, 1, 2]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RESNETS)
@pytest.mark.parametrize("with_example", [False, True])
def test_a_resnet(name, with_example, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    exact = randomize(RESNETS[name]()).double()
    stock = copy.deepcopy(exact).to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 64, 64, dtype=dtype).to(device, memory_format=torch.channels_last)
    fused = fuse_conv_bn_act_(stock, x if with_example else None)

    ours, others = calls(fused)
    assert sorted(ours) == sorted(convolutions(stock))
    assert others == ["maxpool", "avgpool", torch.flatten, "fc"]
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    folded = fused.meta["fused_convs"]
    assert [conv.name for conv in folded] == convolutions(fused)
    blocks = sum(len(getattr(stock, f"layer{i}")) for i in (1, 2, 3, 4))
    assert sum(conv.residual for conv in folded) == blocks

    with torch.no_grad():
        wanted = exact(x.double().cpu()).to(device)
        # Float32 weights are rounded once more where they are folded.
        floor = 2e-6 if dtype == torch.float32 else 2e-3
        check([fused(x)], [stock(x)], [wanted], floor)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_go_through_a_fused_resnet(device):
    stock = randomize(ResNet(Bottleneck, [1, 1, 1, 1])).to(device)
    exact = copy.deepcopy(stock).double()
    x = torch.randn(2, 3, 64, 64, device=device)
    grads = []
    for model in (fuse_conv_bn_act_(stock), stock, exact):
        y = x.detach().to(model.fc.weight.dtype).requires_grad_()
        model(y).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        grads.append([y.grad])
    check(*grads, floor=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_logits_of_a_resnet50_are_those_of_torchvision(training):
    exact = randomize(resnet50()).cuda().double()
    stock = copy.deepcopy(exact).to(torch.bfloat16, memory_format=torch.channels_last)
    if training:
        ours = copy.deepcopy(stock)
        for name in convolutions(ours):
            conv = ours.get_submodule(name)
            ours.set_submodule(name, ConvAct2d.of(conv, "none", conv.weight, conv.bias))
        for model in (exact, stock, ours):
            model.train()
    else:
        ours = fuse_conv_bn_act_(stock)
    x = torch.randn(8, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        check([ours(x)], [stock(x)], [exact(x.double())], floor=2e-3)


def test_the_model_itself_stays_and_shares_what_is_not_folded(capsys):
    stock = randomize(nn.Sequential(*block(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Linear(5, 3)))
    x = torch.randn(2, 4, 5, 5)
    before, state = stock(x), copy.deepcopy(stock.state_dict())
    planned = fuse_conv_bn_act_(stock, dry_run=True)
    lines = ["0 + 1 + relu -> ConvAct2d", "3 + relu -> ConvAct2d"]
    assert capsys.readouterr().out.splitlines() == lines
    assert [str(conv) for conv in planned.meta["fused_convs"]] == lines
    assert list(planned.state_dict()) == list(state)

    fused = fuse_conv_bn_act_(stock)
    assert list(fused.state_dict()) == [k for k in state if not k.startswith("1.")]
    for name in ("3.weight", "3.bias", "5.weight", "5.bias"):
        assert fused.get_parameter(name) is stock.get_parameter(name)
    torch.testing.assert_close(stock.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(stock(x), before, rtol=0, atol=0)
    for again in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(again(x), before, rtol=1e-4, atol=1e-5)
    assert fuse_conv_bn_act_(fused).meta["fused_convs"] == []


def block(activation=None, **options):
    return nn.Conv2d(4, 8, 3, padding=1, **options), nn.BatchNorm2d(8), activation or nn.ReLU()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_sequences(name, dtype, device):
    exact = nn.Sequential(
        *block(ACTIVATIONS[name], bias=False), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True)
    )
    exact = randomize(exact).double().to(device)
    stock = copy.deepcopy(exact).to(dtype)
    x = torch.randn(2, 4, 9, 9, device=device, dtype=dtype)
    fused = fuse_conv_bn_act_(stock)
    assert calls(fused) == (["0", "3"], [])
    assert [conv.activation for conv in fused.meta["fused_convs"]] == [name, "relu"]
    assert fused.get_submodule("0").weight.dtype == dtype
    with torch.no_grad():
        check([fused(x)], [stock(x)], [exact(x.double())], 1e-5 if dtype == torch.float32 else 5e-3)


def test_other_dimensions_and_norms_without_parameters():
    for dims in (1, 2, 3):
        conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        stock = nn.Sequential(conv(4, 6, 3), norm(6, affine=False, eps=0.1)).eval()
        nn.init.normal_(stock[1].running_mean)
        fused = fuse_conv_bn_act_(stock)
        assert calls(fused) == (["0"], [])
        x = torch.randn(2, 4, *[5] * dims)
        torch.testing.assert_close(fused(x), stock(x), rtol=1e-4, atol=1e-5)


class Net(nn.Module):
    """Two convolutions, a norm each, and what a test makes of them."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.randn(1, 4, 1, 1))
        self.relu = nn.ReLU(inplace=True)
        self.compute = forward

    def forward(self, x):
        return self.compute(self, x)


def two_users(m, x):
    y = m.a(x)
    return m.norm_a(y) + y.mean()


def norm_with_two_users(m, x):
    y = m.norm_a(m.a(x))
    return F.relu(y) * y


def pre_activated(m, x):
    y = m.a(F.relu(m.norm_a(x)))
    return m.b(F.relu(m.norm_b(y))) + x


def constant(m, x):
    return F.relu(m.norm_a(m.a(x)) + 1.5)


def scaled(m, x):
    return torch.add(m.a(x), x, alpha=2)


def with_parameter(m, x):
    return m.norm_a(m.a(x)) + m.scale


def twice_the_same(m, x):
    y = m.norm_a(m.a(x))
    return F.relu(y + y)


def functional(m, x):
    return F.relu(torch.add(m.norm_a(m.a(x)), x), inplace=True)


def assigned(m, x):
    y = m.norm_a(m.a(x))
    y += x
    return m.relu(y)


def methods(m, x):
    return m.norm_a(m.a(x)).add_(x).relu_()


def tanh_gelu(m, x):
    return F.gelu(x + m.a(x), approximate="tanh")


def shared_relu(m, x):
    x = m.relu(m.norm_a(m.a(x)))
    return m.relu(m.norm_b(m.b(x)) + x)


def called_twice(m, x):
    return m.norm_b(m.a(F.relu(m.norm_a(m.a(x)))))


def shared_norm(m, x):
    return m.norm_a(m.b(m.norm_a(m.a(x))))


def both(m, x):
    return F.silu(m.norm_a(m.a(x)) + m.norm_b(m.b(x)))


def later_term_is_no_convolution(m, x):
    y = m.norm_a(m.a(x))
    return m.relu(F.avg_pool2d(x, 3, 1, 1) + y)


def written_between(m, x):
    x = x * 1
    y = m.a(x)
    x.mul_(2)
    return F.relu(y)


def written_to(m, x):
    x = x * 1
    x.add_(m.a(x))
    return x * 3


def own_weight(m, x):
    return F.relu(m.a(x)) * m.a.weight.mean()


#: The forward, what becomes a ConvAct (its name, norm, residual, activation), how many other calls.
NETS = [
    (two_users, [], 4),
    (norm_with_two_users, [("a", "norm_a", False, "none")], 2),
    (pre_activated, [("a", "norm_b", False, "relu"), ("b", None, True, "none")], 2),
    (constant, [("a", "norm_a", False, "none")], 2),
    (scaled, [], 2),
    (with_parameter, [("a", "norm_a", False, "none")], 1),
    (twice_the_same, [("a", "norm_a", False, "none")], 2),
    (functional, [("a", "norm_a", True, "relu")], 0),
    (assigned, [("a", "norm_a", True, "relu")], 0),
    (methods, [("a", "norm_a", True, "relu")], 0),
    (tanh_gelu, [("a", None, True, "gelu_tanh")], 0),
    (shared_relu, [("a", "norm_a", False, "relu"), ("b", "norm_b", True, "relu")], 0),
    (called_twice, [], 5),
    (shared_norm, [("a", "norm_a", False, "none"), ("b", "norm_a", False, "none")], 0),
    (both, [("a", "norm_a", False, "none"), ("b", "norm_b", True, "silu")], 0),
    (later_term_is_no_convolution, [("a", "norm_a", True, "relu")], 1),
    (written_between, [], 4),
    (written_to, [], 4),
    (own_weight, [], 4),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("forward", "wanted", "rest"), NETS, ids=[forward.__name__ for forward, _, _ in NETS]
)
def test_what_is_folded(forward, wanted, rest, device):
    stock = randomize(Net(forward)).to(device)
    exact = copy.deepcopy(stock).double()
    x = torch.randn(2, 4, 6, 6, device=device)
    for example in (None, x):
        fused = fuse_conv_bn_act_(stock, example)
        found = [(c.name, c.norm, c.residual, c.activation) for c in fused.meta["fused_convs"]]
        assert found == wanted
        ours, others = calls(fused)
        assert sorted(ours) == sorted(name for name, *_ in wanted)
        assert len(others) == rest
        with torch.no_grad():
            check([fused(x)], [stock(x)], [exact(x.double())])


def test_an_example_shows_which_sums_broadcast():
    def forward(m, x):
        return m.a(x) + F.adaptive_avg_pool2d(x, 1)

    stock, x = Net(forward).eval(), torch.randn(2, 4, 6, 6)
    fused = fuse_conv_bn_act_(stock, [x])
    assert fused.meta["fused_convs"] == []
    torch.testing.assert_close(fused(x), stock(x))
    with pytest.raises(ValueError, match="residual must be like the output"):
        fuse_conv_bn_act_(stock)(x)


def test_hooks_stay():
    stock = randomize(nn.Sequential(*block()))
    seen = []
    stock[1].register_forward_hook(lambda *_: seen.append("norm"))
    fused = fuse_conv_bn_act_(stock)
    fused(torch.randn(2, 4, 5, 5))
    assert seen == ["norm"]
    assert type(fused.get_submodule("0")) is nn.Conv2d


def test_training_mode():
    with pytest.raises(ValueError, match=r"'1' is in training mode.* call model.eval"):
        fuse_conv_bn_act_(nn.Sequential(*block()))
    fused = fuse_conv_bn_act_(nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU()))
    assert calls(fused) == (["0"], [])
    assert fused.get_submodule("0").training
    # The batch's own statistics count in eval mode too.
    unknown = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=False))
    assert fuse_conv_bn_act_(unknown.eval()).meta["fused_convs"] == []


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_without_a_break(device):
    torch._dynamo.reset()
    stock = randomize(Net(shared_relu)).to(device)
    x = torch.randn(2, 4, 6, 6, device=device)
    fused = fuse_conv_bn_act_(stock)
    with torch.no_grad():
        compiled = torch.compile(fused, fullgraph=True)(x)
        torch.testing.assert_close(compiled, fused(x), rtol=1e-3, atol=1e-4)
