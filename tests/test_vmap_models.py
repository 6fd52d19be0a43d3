"""vmap as it is used: one call of many samples, jacobians, gradients of each sample, ensembles."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
import cudnn_ops.nn
from examples.llama import Llama, LlamaConfig, Operators
from tests.cases.vmap import values
from tests.conftest import DEVICES
from tests.test_vmap import PROBLEMS

attend = cudnn_ops.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("without_vmap_fallback")
_INT = torch.int32


class _Calls(TorchDispatchMode):
    """Counts the calls of the package's operators that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cudnn_ops":
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


_MANY_CALLS = {
    *("sdpa_lengths", "sdpa_lengths_alibi", "varlen_sinks", "varlen_alibi", "paged_sinks"),
    *("mlp", "mlp_relu", "mlp_gated"),
    *("moe_permute", "grouped_linear"),  # offsets are of one sample
    *("rotary_positions", "rotary_everything"),  # with a table of its own for each
}
#: With a weight of each sample, torch's batched product, and none of ours.
_TORCH_S = {"linear", "linear_relu", "linear_silu", "linear_one_row"}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_samples_are_one_call(problem):
    """Where all tensors are batched; the gradient may take one more for the parameters."""
    samples = [problem.tensors(torch.float64, "cpu", seed) for seed in range(4)]
    tensors = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    with _Calls() as calls:
        vmap(lambda tensors: problem.ours(**tensors))(tensors)
    most = 4 if problem.name in _MANY_CALLS else 1
    assert list(calls.counts.values()) == ([] if problem.name in _TORCH_S else [most])
    if not problem.wanted:
        return

    def loss(wanted: dict[str, Tensor], others: dict[str, Tensor]) -> Tensor:
        results = problem.ours(**wanted, **others)
        return (results if isinstance(results, Tensor) else results[0]).sum()

    wanted = {name: tensors.pop(name) for name in problem.wanted}
    with _Calls() as calls:
        vmap(grad(loss))(wanted, tensors)
    assert sum(calls.counts.values()) <= 3 * most


@pytest.mark.parametrize("device", DEVICES)
def test_images_of_samples_are_channels_last(device):
    x, weight = values(3, 2, 8, 6, 5, device=device), values(16, 8, 3, 3, device=device)
    for out in vmap(lambda x: cudnn_ops.conv2d(x, weight))(x):
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_one_tensor_of_offsets_stays_one(monkeypatch):
    """Packed attention takes it for self-attention."""
    q = values(3, 7, 2, 8)
    offsets = torch.tensor([[0, 3, 7], [0, 0, 7], [0, 5, 7]], dtype=_INT)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func is torch.ops.cudnn_ops.varlen_attention.default:
                seen.append(args[3] is args[4])
            return func(*args, **(kwargs or {}))

    def one(q: Tensor, offsets: Tensor) -> Tensor:
        return cudnn_ops.varlen_attention(q, q, q, offsets, offsets, 7, 7)

    with Watch():
        vmap(one)(q, offsets)
        vmap(one, in_dims=(0, None))(q, offsets[0])
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("function", "formula", "shape"),
    [
        (
            lambda x: attend(x, x, x),
            lambda x: F.scaled_dot_product_attention(x, x, x),
            (2, 2, 3, 8),
        ),
        (
            lambda x: attend(x, x, x, is_causal=True)[0, 0, 0, :2],
            lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0, :2],
            (1, 2, 3, 8),
        ),
        (lambda x: cudnn_ops.rms_norm(x, (8,), x[0]), lambda x: F.rms_norm(x, (8,), x[0]), (3, 8)),
        (
            lambda x: cudnn_ops.layer_norm(x, (8,), x[0], x[1]),
            lambda x: F.layer_norm(x, (8,), x[0], x[1]),
            (3, 8),
        ),
        (lambda x: cudnn_ops.geglu(x, x + 1), lambda x: F.gelu(x) * (x + 1), (2, 8)),
        (lambda x: cudnn_ops.conv1d(x, x[:, :, :2]), lambda x: F.conv1d(x, x[:, :, :2]), (2, 2, 5)),
    ],
    ids=["sdpa", "sdpa_some", "rms_norm", "layer_norm", "geglu", "conv1d"],
)
def test_jacobians(function, formula, shape):
    x = values(*shape)
    expected = torch.autograd.functional.jacobian(formula, x)  # row by row
    torch.testing.assert_close(jacrev(function)(x), expected)
    torch.testing.assert_close(jacrev(function, chunk_size=5)(x), expected)
    samples = torch.stack([x, x.flip(0)])
    torch.testing.assert_close(vmap(jacrev(function))(samples)[0], expected)


def _llama(by: str, device: str, layers: int = 2) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(layers=layers, width=32, heads=4, kv_heads=2, sequence=12, vocabulary=19)
    return Llama(config, Operators.named(by)).to(device)


def _per_sample(model: Llama) -> Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, window: Tensor) -> Tensor:
            return self.model.loss(window[None])

    loss = Loss()

    def of_one(parameters: dict[str, Tensor], window: Tensor) -> Tensor:
        named = {f"model.{name}": parameter for name, parameter in parameters.items()}
        return functional_call(loss, named, (window,))

    return vmap(grad(of_one), in_dims=(None, 0))


def _detached(model: Llama) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _check_per_sample(found: dict[str, Tensor], windows: Tensor, model: Llama) -> None:
    """Against a model by torch's operators, one window at a time."""
    for i, window in enumerate(windows):
        model.zero_grad()
        model.loss(window[None]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            error = (found[name][i] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert error <= (4e-2 if windows.is_cuda else 1e-4), (name, i, error)


def _windows(device: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(19, (count, 11), generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_each_sample_of_a_model(device):
    model, windows = _llama("cudnn_ops", device), _windows(device, 5)
    found = _per_sample(model)(_detached(model), windows)
    _check_per_sample(found, windows, _llama("torch", device))


@pytest.fixture
def _fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_gradients_of_each_sample_of_a_model(device):
    model, stock = (_llama(by, device, layers=1) for by in ("cudnn_ops", "torch"))
    compiled = torch.compile(_per_sample(model), backend="aot_eager", fullgraph=True)
    for count in (4, 5):  # another number of samples makes it symbolic
        windows = _windows(device, count)
        _check_per_sample(compiled(_detached(model), windows), windows, stock)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("device", DEVICES)
def test_generated_code_of_gradients_of_each_sample(device):
    """Inductor's, of a norm's weight and of attention."""
    x, weight = values(3, 1, 2, 5, 8, device=device), values(8, device=device)

    def loss(weight: Tensor, x: Tensor, by: Any) -> Tensor:
        q = by.rms_norm(x, (8,), weight, 1e-5)
        return by.scaled_dot_product_attention(q, q, q).double().square().sum()

    compiled = torch.compile(vmap(grad(lambda w, x: loss(w, x, cudnn_ops)), in_dims=(None, 0)))
    found = compiled(weight, x)
    tolerance = {"rtol": 5e-2, "atol": 0.1} if device == "cuda" else {}
    for i, sample in enumerate(x):
        leaf = weight.double().requires_grad_()
        (exact,) = torch.autograd.grad(loss(leaf, sample.double(), F), leaf)
        torch.testing.assert_close(found[i].double(), exact, **tolerance)


class _Net(nn.Module):
    """A small network of images by either side's modules."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.first, self.second = by.Conv2d(3, 8, 3, padding=1), by.Conv2d(8, 8, 3, groups=2)
        self.norm = by.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x)))
        return self.norm(x.mean((2, 3)))


def test_an_ensemble_is_one_network():
    """Weights of each sample, images of all or of each."""
    torch.manual_seed(0)
    plain = [_Net(nn).double() for _ in range(3)]
    ours = copy.deepcopy(plain)
    for one in ours:
        assert cudnn_ops.nn.replace_modules_(one)
    parameters, buffers = stack_module_state(ours)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return functional_call(ours[0], (parameters, buffers), (x,))

    x = values(3, 2, 3, 7, 6)
    for dim in (0, None):
        found = vmap(call, in_dims=(0, 0, dim))(parameters, buffers, x if dim == 0 else x[0])
        for i, one in enumerate(plain):
            torch.testing.assert_close(found[i], one(x[i if dim == 0 else 0]))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    q = torch.randn(3, 1, 2, 16, 8, device=device)
    weight = torch.randn(8, 2, 1, 1, device=device)
    for function in (lambda q: attend(q, q, q), lambda q: cudnn_ops.conv2d(q, weight)):
        with torch.autocast(device, torch.bfloat16):
            found, expected = vmap(function)(q), torch.stack([function(one) for one in q])
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
