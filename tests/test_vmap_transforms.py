"""What surrounds vmap: randomness, refusals, models, compilers; and that it is one call of many."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
import cudnn_ops.nn
from examples.llama import Llama, LlamaConfig, Operators
from tests.cases.vmap import PROBLEMS
from tests.conftest import DEVICES

attend = cudnn_ops.scaled_dot_product_attention
_INT = torch.int32


@pytest.fixture(autouse=True)
def _without_fallback():
    """Torch's own loop over samples, for operators without a rule, raises."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def _randn(*shape: int, device: str = "cpu", dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float64)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


# One call


class _Calls(TorchDispatchMode):
    """Counts the calls of the package's operators that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cudnn_ops":
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


_MANY_CALLS = {"sdpa_lengths", "sdpa_lengths_alibi", "varlen_sinks", "varlen_alibi", "paged_sinks"}


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_samples_are_one_call(problem):
    """Where all tensors are batched; the gradient may take one more for the parameters."""
    samples = [problem.tensors(torch.float64, "cpu", seed) for seed in range(4)]
    tensors = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    with _Calls() as calls:
        vmap(lambda tensors: problem.ours(**tensors))(tensors)
    most = 4 if problem.name in _MANY_CALLS else 1
    assert list(calls.counts.values()) == [most]
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
    x, weight = _randn(3, 2, 8, 6, 5, device=device), _randn(16, 8, 3, 3, device=device)
    for out in vmap(lambda x: cudnn_ops.conv2d(x, weight))(x):
        assert out.is_contiguous(memory_format=torch.channels_last)


def test_one_tensor_of_offsets_stays_one(monkeypatch):
    """Packed attention takes it for self-attention."""
    q = _randn(3, 7, 2, 8)
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


# Random numbers


def _dropping(q: Tensor, **options: Any) -> Tensor:
    return attend(q, q, q, dropout_p=0.5, **options)


def _dropping_packed(q: Tensor, **options: Any) -> Tensor:
    tokens = q[0].transpose(0, 1)
    offsets = torch.tensor([0, 5, tokens.shape[0]], dtype=_INT, device=q.device)
    longest = tokens.shape[0]
    return cudnn_ops.varlen_attention(
        tokens, tokens, tokens, offsets, offsets, longest, longest, 0.5, **options
    )


def _dropping_with_lse(q: Tensor, **options: Any) -> Tensor:
    return cudnn_ops.scaled_dot_product_attention_with_lse(q, q, q, dropout_p=0.5, **options)[0]


DROPPING = [_dropping, _dropping_with_lse, _dropping_packed]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
def test_random_numbers_are_refused_by_default(drop, device):
    q = _randn(1, 2, 16, 8, device=device)
    for samples in (q.expand(3, -1, -1, -1, -1), torch.zeros(3, device=device)):

        def one(sample: Tensor) -> Tensor:
            return drop(sample) if sample.dim() else drop(q) + sample

        for function in (one, grad(lambda sample, one=one: one(sample).sum())):
            with pytest.raises(RuntimeError, match="randomness error mode"):
                vmap(function)(samples)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
@pytest.mark.parametrize("is_batched", [True, False])
def test_randomness(drop, is_batched, device):
    q = _randn(1, 2, 16, 8, device=device)
    samples = q.expand(3, -1, -1, -1, -1) if is_batched else torch.zeros(3, device=device)

    def one(sample: Tensor) -> Tensor:
        return drop(sample) if is_batched else drop(q) + sample.to(q.dtype)

    first, *others = vmap(one, randomness="same")(samples)
    assert all(torch.equal(other, first) for other in others)
    assert not torch.equal(vmap(one, randomness="same")(samples)[0], first)
    a, b, c = vmap(one, randomness="different")(samples)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    assert not torch.equal(a, c)


@pytest.mark.parametrize("device", DEVICES)
def test_randomness_of_nested_samples(device):
    q = _randn(1, 2, 16, 8, device=device)
    for outer, inner in (("different", "same"), ("same", "different")):
        found = vmap(
            lambda _, inner=inner: vmap(_dropping, randomness=inner)(q.expand(2, -1, -1, -1, -1)),
            randomness=outer,
        )(torch.zeros(2, device=device))
        assert torch.equal(found[0, 0], found[0, 1]) == (inner == "same")
        assert torch.equal(found[0, 0], found[1, 0]) == (outer == "same")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_drop_what_the_forward_dropped(randomness, device):
    """The output is linear in the values: a gradient times them is the output."""
    q, v = _randn(3, 1, 2, 16, 8, device=device), _randn(3, 1, 2, 16, 16, device=device)

    def loss(v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(q, q, v, dropout_p=0.5).double().sum()
        return out, out

    grads, losses = vmap(grad(loss, has_aux=True), randomness=randomness)(v, q)
    found = (grads.double() * v.double()).flatten(1).sum(1)
    tolerance = {"rtol": 2e-2, "atol": 0.5} if device == "cuda" else {}
    torch.testing.assert_close(found, losses, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drop", DROPPING)
def test_a_given_state_is_that_of_a_loop(drop, device):
    q = _randn(3, 1, 2, 16, 8, device=device)
    states = torch.tensor([[5, 0], [6, 8], [5, 0]], device=device)
    for dims, given in ((0, states), (None, states[0])):
        found = vmap(lambda q, s: drop(q, rng_state=s), in_dims=(0, dims))(q, given)
        for i, sample in enumerate(q):
            assert torch.equal(found[i], drop(sample, rng_state=states[i if dims == 0 else 0]))


# Refusals


def test_what_writes_in_place_is_refused():
    cache, token = torch.zeros(3, 4, 2, 8), torch.zeros(5, 1, 2, 8)
    slots = torch.tensor([0])
    with pytest.raises(NotImplementedError, match=r"paged_kv_append_ is not available under vmap"):
        vmap(lambda t: cudnn_ops.paged_kv_append_(cache, cache, t, t, slots))(token)
    pages, lengths = torch.zeros(1, 1, dtype=_INT), torch.ones(1, dtype=_INT)
    out = torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotImplementedError, match="call it without out"):
        vmap(lambda q: cudnn_ops.paged_attention(q, cache, cache, pages, lengths, out=out))(
            token[:, None]
        )


def test_a_mistake_is_that_of_a_sample():
    """Its shapes are those that the function in the vmap sees."""
    q = _randn(3, 2, 4, 5, 8)
    image_weight = _randn(4, 5, 1, 1)
    calls: list[tuple[Callable[[Tensor], object], Tensor]] = [
        (lambda q: attend(q, q[:, :3], q[:, :3]), q),
        (lambda q: attend(q, q, q, q[..., :2, :]), q),
        (lambda q: attend(q, q, q, seq_lens_kv=torch.tensor([9, 1])), q),
        (lambda x: cudnn_ops.rms_norm(x, (7,)), q),
        (lambda x: cudnn_ops.rms_norm(q[0], (8,), x), _randn(3, 7)),
        (lambda x: cudnn_ops.swiglu(x, x[1:]), q),
        (lambda x: cudnn_ops.rotary_embedding(x, x[0], x[0]), q),
        (lambda x: cudnn_ops.conv2d(x, image_weight), q),
        (lambda x: cudnn_ops.conv2d(q[0], x), _randn(3, 4, 5, 1, 1)),
    ]
    for function, samples in calls:
        with pytest.raises(ValueError, match="cudnn_ops") as of_one:
            function(samples[0])
        with pytest.raises(ValueError, match=re.escape(str(of_one.value))):
            vmap(function)(samples)


def _calls_with_tangents() -> list[Any]:
    """Each floating-point argument of each operator."""
    calls = []
    for problem in PROBLEMS:
        for name, tensor in problem.tensors(torch.float64, "cpu", 0).items():
            if tensor.is_floating_point():
                calls.append(pytest.param(problem, name, id=f"{problem}-{name}"))
    return calls


@pytest.mark.parametrize(("problem", "name"), _calls_with_tangents())
def test_forward_mode_is_refused(problem, name):
    tensors = problem.tensors(torch.float64, "cpu", 0)
    one = tensors.pop(name)

    def function(one: Tensor) -> object:
        return problem.ours(**{name: one}, **tensors)

    with pytest.raises(NotImplementedError, match=r"cudnn_ops\..*forward-mode derivatives"):
        jvp(function, (one,), (one,))
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        vmap(lambda tangent: jvp(function, (one,), (tangent,)))(torch.stack([one, one]))


@pytest.mark.parametrize("problem", [problem for problem in PROBLEMS if problem.wanted], ids=str)
def test_forward_mode_of_a_backward_is_refused(problem):
    """Of the gradient of the results alone, in which it is linear."""
    tensors = problem.tensors(torch.float64, "cpu", 0)
    wanted = {name: tensors.pop(name) for name in problem.wanted}
    results, pull = torch.func.vjp(lambda wanted: problem.ours(**wanted, **tensors), wanted)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        jvp(pull, (results,), (results,))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: attend(x, x, x), (1, 2, 5, 8)),
        (lambda x: cudnn_ops.rms_norm(x, (8,)), (5, 8)),
        (lambda x: cudnn_ops.swiglu(x, x), (5, 8)),
        (lambda x: cudnn_ops.conv1d(x, x[:, :, :2]), (2, 2, 5)),
    ],
    ids=["sdpa", "rms_norm", "swiglu", "conv1d"],
)
def test_second_derivatives_are_refused(function, shape):
    x = _randn(3, *shape)

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    with pytest.raises(RuntimeError, match=r"cudnn_ops.*double backward"):
        vmap(grad(lambda x: grad(loss)(x).square().sum()))(x)
    for second in (hessian(loss), jacfwd(grad(loss))):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            second(x[0])


def test_a_rotation_is_differentiable_twice():
    x, cos, sin = _randn(3, 1, 2, 5, 8), _randn(1, 5, 8), _randn(1, 5, 8).neg()

    def loss(x: Tensor) -> Tensor:
        return cudnn_ops.rotary_embedding(x, cos, sin).pow(3).sum()

    def formula(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).pow(3).sum()

    found, expected = (
        vmap(grad(lambda x, f=function: grad(f)(x).square().sum()))(x)
        for function in (loss, formula)
    )
    torch.testing.assert_close(found, expected)


# Jacobians


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
    x = _randn(*shape)
    expected = torch.autograd.functional.jacobian(formula, x)  # row by row
    torch.testing.assert_close(jacrev(function)(x), expected)
    torch.testing.assert_close(jacrev(function, chunk_size=5)(x), expected)
    samples = torch.stack([x, x.flip(0)])
    torch.testing.assert_close(vmap(jacrev(function))(samples)[0], expected)


# Models


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
    x, weight = _randn(3, 1, 2, 5, 8, device=device), _randn(8, device=device)

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

    x = _randn(3, 2, 3, 7, 6)
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
