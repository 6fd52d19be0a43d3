"""The pattern of convolutions with what follows them: every spelling that models have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

import cudnn_ops
from cudnn_ops.compiler.choice import Times
from cudnn_ops.compiler.pattern import Found, Pattern
from cudnn_ops.compiler.patterns.dense_groups import dense
from tests.cases.compiler import Rewritten, Timed, check_swap

C, K = 4, 6


def _modules(
    function: Callable[..., Any], *modules: nn.Module, dtype: torch.dtype = torch.float64
) -> Callable[..., Any]:
    """A function of tensors that calls it with modules that do not train, nor are as they began."""
    ready = [module.to(dtype).eval() for module in modules]
    for module in ready:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)

    def call(*inputs: Tensor) -> Any:
        return function(*ready, *inputs)

    return call


def _x(dims: int = 2, *, last: bool = False) -> Tensor:
    x = torch.randn(2, C, *(9, 7, 5)[:dims], dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if last else x


def _weight(dims: int = 2, groups: int = 1) -> Tensor:
    return torch.randn(K if groups == 1 else 2 * groups, C // groups, *[3] * dims).double()


def _of_ours(found: Rewritten, count: int = 1) -> Any:
    """The activation and the residual of the one call."""
    assert len(found.ours) == count
    assert all("conv" in str(node.target) for node in found.ours)
    *_, activation, residual = found.ours[-1].args
    return activation, residual is not None


GEOMETRIES = {
    "plain": {},
    "stride": {"stride": 2},
    "pairs": {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": C, "padding": 1},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_geometries(geometry, has_bias):
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias if has_bias else None, **geometry).relu()

    weight = _weight(groups=geometry.get("groups", 1))
    bias = torch.randn(weight.shape[0]).double()
    found = check_swap(block, _x(), weight, bias, expect=["convolution"])
    assert _of_ours(found) == ("relu", False)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dimensions(dims):
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolve = (F.conv1d, F.conv2d, torch.conv3d)[dims - 1]
        return F.silu(convolve(x, weight, bias, 1, 1))

    bias = torch.randn(K).double()
    found = check_swap(block, _x(dims), _weight(dims), bias, expect=["convolution"])
    assert _of_ours(found) == ("silu", False)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu method": torch.Tensor.relu,
    "relu _": lambda x: x.relu_(),
    "relu6": F.relu6,
    "relu6 in place": nn.ReLU6(inplace=True),
    "relu6 hardtanh": nn.Hardtanh(0.0, 6.0),
    "silu": nn.SiLU(inplace=True),
    "silu by hand": lambda x: x * torch.sigmoid(x),
    "hardswish": nn.Hardswish(inplace=True),
    "hardswish by hand": lambda x: x * (F.relu6(x + 3.0) / 6.0),
    "hardswish by hand, too": lambda x: x * F.relu6(x + 3, inplace=True) / 6,
    "leaky_relu": nn.LeakyReLU(),
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.01, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": nn.GELU(approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.conv2d(x, weight, padding=1))

    found = check_swap(block, _x(), _weight(), expect=["convolution"])
    assert _of_ours(found) == (name.split(" ")[0], False)


CLAMPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "relu in place": lambda x: x.clamp_(0),
    "relu6": lambda x: torch.clamp(x, 0, 6),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_clamps(name):
    """At their limits the gradient is 1, as of products with weights that are all zero."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return CLAMPS[name](F.conv2d(x, weight, padding=1))

    found = check_swap(block, _x(), _weight(), expect=["convolution"], gradients=False)
    assert _of_ours(found) == (name.split(" ")[0], False)
    found = check_swap(block, _x(), 0 * _weight(), expect=["convolution"])
    assert _of_ours(found) == ("none", False)


def _affine(norm: nn.Module) -> nn.Module:
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


NORMS = {
    "batch norm": lambda: _affine(nn.BatchNorm2d(K)),
    "no affine": lambda: nn.BatchNorm2d(K, affine=False),
    "eps": lambda: _affine(nn.BatchNorm2d(K, eps=1e-3, momentum=None)),
    "frozen": lambda: FrozenBatchNorm2d(K),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_norms_in_evaluation(norm, has_bias):
    def block(conv: nn.Module, norm: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
        return act(norm(conv(x)))

    conv = nn.Conv2d(C, K, 3, padding=1, bias=has_bias)
    call = _modules(block, conv, NORMS[norm](), nn.ReLU(inplace=True))
    found = check_swap(call, _x(), expect=["convolution"])
    assert _of_ours(found) == ("relu", False)


def test_gradients_of_all_that_is_folded():
    def block(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        variance = torch.full((K,), 0.7, dtype=torch.float64)
        out = F.conv2d(x, w, b)
        return F.batch_norm(out, mean.detach(), variance, gamma, beta, False, 0.1, 1e-5)

    rows = [torch.rand(K).double() + 0.5 for _ in range(4)]
    check_swap(block, _x(), _weight(), *rows, expect=["convolution"])


def test_norms_in_one_and_three_dimensions():
    def block(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(conv(x))

    for dims, conv, norm in (
        (1, nn.Conv1d(C, K, 3), nn.BatchNorm1d(K)),
        (3, nn.Conv3d(C, K, 3), nn.BatchNorm3d(K)),
    ):
        check_swap(_modules(block, conv, _affine(norm)), _x(dims), expect=["convolution"])


def test_a_row_that_is_added_or_multiplied():
    def added(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        return F.conv2d(x, w) + row[None, :, None, None]

    def multiplied(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
        return row.view(K, 1, 1) * F.conv2d(x, w, row)

    row = torch.randn(K).double()
    for block in (added, multiplied):
        found = check_swap(block, _x(), _weight(), row, expect=["convolution"])
        assert _of_ours(found) == ("none", False)


def _resnet(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    out = norm(conv(x))
    out += identity
    return F.relu(out, inplace=True)


def _identity_first(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    return F.relu(identity + norm(conv(x)))


def _by_method(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    return norm(conv(x)).add(identity).relu()


def _added_in_place(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    return norm(conv(x)).add_(identity).relu_()


def _dropped(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    out = F.dropout(norm(F.dropout(conv(x), 0.3, False)), 0.0, True)
    return F.relu(F.dropout(identity + out, 0.5, False, True))


def _identities(conv: nn.Module, norm: nn.Module, x: Tensor, identity: Tensor) -> Tensor:
    drop = nn.Sequential(nn.Identity(), nn.Dropout(0.5).eval())
    return F.relu(drop(norm(drop(conv(x)))) + identity)


RESIDUALS = [_resnet, _identity_first, _by_method, _added_in_place, _dropped, _identities]


@pytest.mark.parametrize("residual", RESIDUALS, ids=lambda f: f.__name__)
def test_residuals(residual):
    call = _modules(residual, nn.Conv2d(C, K, 3, padding=1), _affine(nn.BatchNorm2d(K)))
    identity = torch.randn(2, K, 9, 7).double()
    found = check_swap(call, _x(), identity, expect=["convolution"])
    assert _of_ours(found) == ("relu", True)


def test_residual_that_is_the_input():
    """As positions that a depthwise convolution adds."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return x + F.conv2d(x, weight, padding=1, groups=C)

    weight = torch.randn(C, 1, 3, 3).double()
    found = check_swap(block, _x(), weight, expect=["convolution"])
    assert _of_ours(found) == ("none", True)


def test_bottleneck_with_a_projection():
    """Of the two convolutions of the sum, one takes the other's result."""

    def block(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        out = second(F.relu(first(x), inplace=True))
        out += first(x)
        return F.relu(out, inplace=True)

    def conv(channels: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, K, 3, padding=1, bias=False), _affine(nn.BatchNorm2d(K))
        )

    found = check_swap(_modules(block, conv(C), conv(K)), _x(), expect=["convolution"] * 3)
    assert _of_ours(found, 3) == ("relu", True)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_a_chain_of_both_memory_formats(last):
    def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, first, padding=1)), second, stride=2)

    second = torch.randn(C, K, 3, 3).double()
    found = check_swap(block, _x(last=last), _weight(), second, expect=["convolution"] * 2)
    stock = block(_x(last=last), _weight(), second)
    result = found(_x(last=last), _weight(), second)
    assert result.stride() == stock.stride()


def test_patches():
    def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = F.conv2d(x, weight, bias, stride=3)
        return x.flatten(2).transpose(1, 2) @ torch.ones(K, 2, dtype=x.dtype)

    found = check_swap(block, _x(), _weight(), torch.randn(K).double(), expect=["convolution"])
    copies = [node for node in found.graphs[0].graph.nodes if node.target == "permute"]
    assert copies == []  # our layout is the one that the product reads


STEMS = {
    "ResNet's": (3, 7, 3, (16, 20)),
    "EfficientNet's": (3, 3, 1, (14, 6)),
    "no padding": (3, 3, 0, (8, 10)),
    "even kernel": (1, 4, 1, (12, 8)),
    "four channels": (4, 5, 2, (10, 10)),
    "one pixel": (2, 1, 0, (6, 4)),
    "more padding": (3, 3, 2, (4, 6)),
    "pixels that nothing reads": (3, 2, 0, (6, 6)),
    "rows and columns": (3, (3, 6), (1, 0), (8, 12)),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("stem", STEMS)
def test_what_networks_begin_with(stem, last):
    """By squares of pixels: the same sums, whatever is read of the last squares."""
    channels, kernel, padding, sizes = STEMS[stem]
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w, b, stride=2, padding=padding).relu()

    x = torch.randn(2, channels, *sizes, dtype=torch.float64)
    x = x.to(memory_format=torch.channels_last) if last else x
    w, b = torch.randn(K, channels, *kernel).double(), torch.randn(K).double()
    found = check_swap(function, x, w, b, expect=["convolution"])
    (candidate,) = found.report.swapped
    assert candidate.note == "by squares of 2 x 2 pixels"
    stride, own_padding = found.ours[0].args[3:5]
    assert (stride, own_padding) == ([1, 1], [0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("stem", ["ResNet's", "EfficientNet's", "even kernel"])
def test_what_networks_begin_with_on_a_gpu(stem):
    channels, kernel, padding, _ = STEMS[stem]
    torch.manual_seed(0)
    modules = nn.Conv2d(channels, 32, kernel, 2, padding), nn.BatchNorm2d(32), nn.ReLU()
    model = nn.Sequential(*modules).cuda().eval()
    x = torch.randn(4, channels, 96, 64, device="cuda", dtype=torch.bfloat16)
    right = copy.deepcopy(model).double()(x.double())
    model.bfloat16()
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    compiled = torch.compile(model, backend="cudnn_ops", options={"swap": ["convolution"]})
    (candidate,) = cudnn_ops.compile_report().swapped if compiled(x) is not None else ()
    assert candidate.note
    mine, torchs = (float((one(x) - right).norm() / right.norm()) for one in (compiled, model))
    assert mine <= 2 * torchs + 1e-3
    (found,) = torch.autograd.grad(compiled(x).float().sum(), model[0].weight)
    (expected,) = torch.autograd.grad(model(x).float().sum(), model[0].weight)
    assert (found - expected).float().norm() <= 2e-2 * expected.float().norm()


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((3, 9, 8), {"stride": 2}),
        ((3, 8, 8), {"stride": (2, 1)}),
        ((3, 8, 8), {"stride": 2, "dilation": 2}),
        ((8, 8, 8), {"stride": 2}),
        ((4, 8, 8), {"stride": 2, "groups": 2}),
        ((3, 8, 8), {"padding": "same"}),
    ],
)
def test_what_is_no_such_beginning(sizes, options):
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, **options)

    x = torch.randn(2, *sizes, dtype=torch.float64)
    w = torch.randn(K, sizes[0] // options.get("groups", 1), 3, 3, dtype=torch.float64)
    found = check_swap(function, x, w, expect=["convolution"])
    assert [candidate.note for candidate in found.report] == [""]


def test_a_beginning_that_is_slower_by_squares():
    """It is tried as it is."""

    def times(_: Pattern, found: Found) -> Times:
        return Times(3.0 if found.note else 1.0, 2.0)

    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    found = Rewritten(lambda x, w: F.conv2d(x, w, stride=2))
    found.chooser = Timed(found.report, times)
    found(x, w)
    (candidate,) = found.report.swapped
    assert (candidate.note, candidate.ours_ms) == ("", 1.0)


def test_dynamic_sizes():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, weight, padding=1))

    check_swap(block, _x(), _weight(), expect=["convolution"], dynamic=True)


def test_autocast():
    def block(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.relu(norm(conv(x)))

    modules = nn.Conv2d(C, K, 3), _affine(nn.BatchNorm2d(K))
    call = _modules(block, *modules, dtype=torch.float32)
    check_swap(call, _x().float(), expect=["convolution"], tolerance=5e-2, gradients=False)


# What only looks like one: what legitimately remains is the convolution itself.


def _other_slope(x: Tensor, weight: Tensor) -> Tensor:
    return F.leaky_relu(F.conv2d(x, weight), 0.2)


def _other_bounds(x: Tensor, weight: Tensor) -> Tensor:
    return F.hardtanh(F.conv2d(x, weight), 0.0, 5.0)


def _hardtanh(x: Tensor, weight: Tensor) -> Tensor:
    return F.hardtanh(F.conv2d(x, weight))


def _clamp_above(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight).clamp(max=0)


def _other_shift(x: Tensor, weight: Tensor) -> Tensor:
    x = F.conv2d(x, weight)
    return x * F.relu6(x + 2) / 6


def _quick_gelu(x: Tensor, weight: Tensor) -> Tensor:
    x = F.conv2d(x, weight)
    return x * torch.sigmoid(1.702 * x)


def _elu(x: Tensor, weight: Tensor) -> Tensor:
    return F.elu(F.conv2d(x, weight))


def _training(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.batch_norm(F.conv2d(x, weight), None, None, training=True))


def _training_with_statistics(x: Tensor, weight: Tensor) -> Tensor:
    mean, variance = torch.zeros(K, dtype=x.dtype), torch.ones(K, dtype=x.dtype)
    return F.relu(F.batch_norm(F.conv2d(x, weight), mean, variance, training=True)) + mean.sum()


def _training_dropout(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.dropout(F.conv2d(x, weight), 1.0, True))


def _image_residual(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, weight) + x.mean((1, 2, 3), keepdim=True))


def _column_scale(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight) * torch.linspace(1, 2, 7, dtype=x.dtype)[:, None]


def _gate_of_each_image(x: Tensor, weight: Tensor) -> Tensor:
    """Squeeze and excitation."""
    gate = x.mean((2, 3), keepdim=True)[:, :1].expand(-1, K, -1, -1)
    return F.conv2d(x, weight) * gate


def _scaled_sum(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(torch.add(F.conv2d(x, weight), weight.sum(), alpha=2))


def _after_the_activation(x: Tensor, weight: Tensor) -> Tensor:
    """The residual is added behind the activation, which is ours."""
    return F.relu(F.conv2d(x, weight, padding=1)) + x.mean(1, keepdim=True).expand(-1, K, -1, -1)


def _used_elsewhere(x: Tensor, weight: Tensor) -> Tensor:
    out = F.conv2d(x, weight)
    return F.relu(out) + out


NEAR_MISSES = {
    **dict.fromkeys((_other_slope, _other_bounds, _hardtanh, _clamp_above), "none"),
    **dict.fromkeys((_other_shift, _quick_gelu, _elu, _training_dropout), "none"),
    **dict.fromkeys((_image_residual, _column_scale, _gate_of_each_image), "none"),
    **dict.fromkeys((_scaled_sum, _used_elsewhere, _training_with_statistics), "none"),
    _after_the_activation: "relu",
}


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_what_only_looks_like_an_epilogue(near_miss):
    found = check_swap(near_miss, _x(), _weight(), expect=["convolution"])
    assert _of_ours(found) == (NEAR_MISSES[near_miss], False)


def test_a_batch_norm_in_training_is_one_by_itself():
    found = check_swap(_training, _x(), _weight(), expect=["convolution", "batch_norm"])
    convolution, norm = found.ours
    assert convolution.args[-2:] == ("none", None)
    assert norm.kwargs["activation"] == "relu"


def test_statistics_that_are_changed():
    """They may be read after that."""

    def block(x: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
        mean = mean * 1.0
        out = F.batch_norm(F.conv2d(x, weight), mean, torch.ones_like(mean))
        mean.add_(1)
        return out + mean.sum()

    row = torch.randn(K).double()
    found = check_swap(block, _x(), _weight(), row, expect=["convolution"], gradients=False)
    assert _of_ours(found) == ("none", False)
    assert "changed in place" in found.report.candidates[0].reason


def test_statistics_that_training_changes():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        mean, variance = torch.zeros(K, dtype=x.dtype), torch.ones(K, dtype=x.dtype)
        out = F.conv2d(x, weight)
        trained = F.batch_norm(x.sin().repeat(1, 2, 1, 1)[:, :K], mean, variance, training=True)
        return F.batch_norm(out, mean, variance).mean() + trained

    found = check_swap(block, _x(), _weight(), expect=["convolution"])
    assert "changed in place" in found.report.candidates[0].reason


def test_an_input_that_is_changed():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        x = x * 1.0
        out = F.conv2d(x, weight)
        x.zero_()
        return F.relu(out) + x.sum()

    check_swap(block, _x(), _weight(), expect=[], gradients=False)


def test_what_follows_is_changed_in_place():
    """Pooled and flattened in between: that is no memory of the convolution's."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        out = F.adaptive_avg_pool2d(F.relu(F.conv2d(x, weight)), 1)
        return torch.flatten(out, 1).mul_(3)

    check_swap(block, _x(), _weight(), expect=["convolution"])


def test_a_norm_without_statistics():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.instance_norm(F.conv2d(x, weight)).relu()

    found = check_swap(block, _x(), _weight(), expect=["convolution"])
    assert _of_ours(found) == ("none", False)


def test_no_batch():
    def block(x: Tensor, weight: Tensor) -> Tensor:
        return F.relu(F.conv2d(x[0], weight))

    found = check_swap(block, _x(), _weight(), expect=[])
    assert "no batch dimension" in found.report.candidates[0].reason


def test_integers():
    def block(x: Tensor) -> Tensor:
        return F.conv2d(x, torch.ones(K, C, 3, 3, dtype=torch.int64))

    check_swap(block, torch.ones(2, C, 5, 5, dtype=torch.int64), expect=[], gradients=False)


GROUPS = {
    "two": (8, 6, 2, {"padding": 1}),
    "ResNeXt's": (16, 16, 8, {"padding": 1, "bias": False}),
    "more outputs": (6, 12, 3, {"stride": 2}),
    "rows": (4, 4, 2, {"kernel_size": (1, 3), "dilation": 2}),
}


@pytest.mark.parametrize("case", GROUPS)
def test_without_groups(case):
    """Zeros between them, in the forward and of what reaches the weight's gradient."""
    inputs, outputs, groups, options = GROUPS[case]
    conv = nn.Conv2d(inputs, outputs, **{"kernel_size": 3, "groups": groups, **options})
    block = nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())
    x = torch.randn(2, inputs, 9, 7, dtype=torch.float64)
    function = _modules(lambda module, x: module(x), block)
    found = check_swap(function, x, expect=["convolution"], tries=True)
    (candidate,) = found.report.swapped
    assert candidate.note == "without its groups"
    assert found.ours[0].args[6] == 1
    # It multiplies more numbers: who asks for the pattern and measures nothing keeps the groups.
    found = check_swap(function, x, expect=["convolution"])
    (candidate,) = found.report.swapped
    assert candidate.note == ""
    assert found.ours[0].args[6] == groups


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 8])
def test_without_groups_on_a_gpu(groups):
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(4, 112, 28, 20, **options)
    weight = torch.randn(112, 112 // groups, 3, 3, **options) / (1008 / groups) ** 0.5

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=2, padding=1, groups=groups).relu()

    found = check_swap(function, x, weight, expect=["convolution"], tries=True, tolerance=6e-2)
    assert found.ours[0].args[6] == 1


@pytest.mark.parametrize(
    ("inputs", "groups", "kernel"),
    [(8, 8, 3), (8, 2, 1), (1024, 4, 3), (64, 32, 3)],
    ids=["depthwise", "one pixel", "many channels", "many groups"],
)
def test_with_its_groups(inputs, groups, kernel):
    weight = torch.randn(inputs, inputs // groups, kernel, kernel, dtype=torch.float64)
    found = check_swap(
        lambda x, w: F.conv2d(x, w, groups=groups),
        *(torch.randn(1, inputs, 4, 4, dtype=torch.float64), weight),
        expect=["convolution"],
        tries=True,
    )
    assert [candidate.note for candidate in found.report] == [""]


def test_an_infinite_weight_stays_in_its_group():
    weight = torch.full((4, 2, 3, 3), torch.inf, dtype=torch.float64)
    found = dense(weight, 2)
    assert found.isinf().sum() == weight.numel()
    assert (found == 0).sum() == weight.numel()
