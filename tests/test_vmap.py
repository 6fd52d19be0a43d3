"""torch.vmap and torch.func.grad of every operator, in any nesting, against loops over torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from tests.cases import sdpa
from tests.cases.vmap import CONVOLUTIONS, LAYERS, ROWS, Problem
from tests.cases.vmap_attention import ATTENTION, PACKED, PAGED
from tests.conftest import DEVICES

pytestmark = pytest.mark.usefixtures("without_vmap_fallback")

PROBLEMS = [*ATTENTION, *PACKED, *PAGED, *ROWS, *CONVOLUTIONS, *LAYERS]
_WITH_GRADIENT = [problem for problem in PROBLEMS if problem.wanted]
_ON = [
    pytest.param("cpu", torch.float64, id="cpu-float64"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
]

Tensors = dict[str, Tensor]


class Samples:
    """The tensors of a problem under vmaps: how many samples each has, and names of their own."""

    def __init__(
        self,
        problem: Problem,
        levels: Sequence[tuple[int, Sequence[str]]],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.problem, self.levels, self.dtype = problem, levels, dtype
        self._drawn = cache(lambda seed: problem.tensors(dtype, device, seed))
        self.names = tuple(self._drawn(0))
        self.given = {name: self._stacked(name, 0, ()) for name in self.names}

    def _one(self, name: str, index: tuple[int, ...]) -> Tensor:
        own = [
            i if name in batched else 0 for i, (_, batched) in zip(index, self.levels, strict=True)
        ]
        return self._drawn(sum(i * 5**k for k, i in enumerate(own)))[name]

    def _dim(self, name: str, level: int) -> int | None:
        """Where the samples are: anywhere."""
        if name not in self.levels[level][1]:
            return None
        inside = sum(name in batched for _, batched in self.levels[level + 1 :])
        rank = self._drawn(0)[name].dim() + inside
        return (self.names.index(name) + 2 * level + 1) % (rank + 1)

    def _stacked(self, name: str, level: int, index: tuple[int, ...]) -> Tensor:
        if level == len(self.levels):
            return self._one(name, index)
        size, dim = self.levels[level][0], self._dim(name, level)
        if dim is None:
            return self._stacked(name, level + 1, (*index, 0))
        parts = [self._stacked(name, level + 1, (*index, i)) for i in range(max(size, 1))]
        return torch.stack(parts, dim).narrow(dim, 0, size)

    def dims(self, level: int, names: Sequence[str]) -> dict[str, int | None]:
        return {name: self._dim(name, level) for name in names}

    def mapped(self, function: Callable[..., object], *groups: Sequence[str]) -> object:
        """What a function of the tensors of some names gives, under all vmaps."""
        for level in reversed(range(len(self.levels))):
            function = vmap(function, in_dims=tuple(self.dims(level, names) for names in groups))
        return function(*({name: self.given[name] for name in names} for names in groups))

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], Tensors]]:
        """Each sample by itself."""
        for index in product(*(range(size) for size, _ in self.levels)):
            yield index, {name: self._one(name, index) for name in self.names}


def _parts(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _in(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def _loss(results: Tensor | Sequence[Tensor]) -> Tensor:
    """Of all numbers of all results, each with a factor that is exact in any dtype."""
    losses = []
    for part in _parts(results):
        finite = part.masked_fill(part.isneginf(), 0.0)  # a log-sum-exp of nothing
        factors = (torch.arange(finite.numel(), device=finite.device) * 5 % 17 - 8) / 8
        losses.append((finite * factors.to(finite.dtype).view(finite.shape)).double().sum())
    return torch.stack(losses).sum()


def _check_results(problem: Problem, samples: Samples, found: Sequence[Tensor]) -> None:
    """All samples together: one has too few numbers to tell how far rounding may take another."""
    exact = [_parts(problem.reference(**_in(t, torch.float64))) for _, t in samples]
    rough = [_parts(problem.reference(**_in(t, samples.dtype))) for _, t in samples]
    assert {len(found)} == {len(parts) for parts in exact}
    for i, part in enumerate(found):
        sdpa.check(
            torch.stack([part[index] for index, _ in samples]),
            torch.stack([parts[i] for parts in exact]),
            torch.stack([parts[i] for parts in rough]),
            f"{problem}: result {i} of {samples.levels}",
        )


def _gradients(problem: Problem, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """By the reference, differentiated by torch's autograd."""
    tensors = _in(tensors, dtype)
    leaves = {name: tensors[name].clone().requires_grad_() for name in problem.wanted}
    loss = _loss(problem.reference(**{**tensors, **leaves}))
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def _others(problem: Problem, samples: Samples) -> list[str]:
    return [name for name in samples.names if name not in problem.wanted]


def _loss_of(problem: Problem) -> Callable[[Tensors, Tensors], Tensor]:
    return lambda wanted, others: _loss(problem.ours(**wanted, **others))


def _check_gradients(problem: Problem, samples: Samples, found: Tensors) -> None:
    exact = [_gradients(problem, tensors, torch.float64) for _, tensors in samples]
    rough = [_gradients(problem, tensors, samples.dtype) for _, tensors in samples]
    for name, grads in found.items():
        assert grads.dtype == samples.given[name].dtype
        sdpa.check(
            torch.stack([grads[index] for index, _ in samples]),
            torch.stack([each[name] for each in exact]),
            torch.stack([each[name] for each in rough]),
            f"{problem}: gradient of {name} of {samples.levels}",
        )


@pytest.mark.parametrize(("device", "dtype"), _ON)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_samples(problem, device, dtype):
    for batched in problem.subsets():
        samples = Samples(problem, [(3, batched)], dtype, device)
        found = _parts(samples.mapped(lambda tensors: problem.ours(**tensors), samples.names))
        _check_results(problem, samples, found)


@pytest.mark.parametrize(("device", "dtype"), _ON)
@pytest.mark.parametrize("problem", _WITH_GRADIENT, ids=str)
def test_gradients_of_samples(problem, device, dtype):
    for batched in problem.subsets():
        samples = Samples(problem, [(3, batched)], dtype, device)
        groups = problem.wanted, _others(problem, samples)
        found = samples.mapped(grad(_loss_of(problem)), *groups)
        _check_gradients(problem, samples, found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", _WITH_GRADIENT, ids=str)
def test_gradient_through_samples(problem, device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    for batched in problem.subsets():
        samples = Samples(problem, [(3, batched)], dtype, device)
        names = _others(problem, samples)
        others = {name: samples.given[name] for name in names}
        dims = samples.dims(0, problem.wanted), samples.dims(0, names)

        def loss(wanted: Tensors, problem=problem, dims=dims, others=others) -> Tensor:
            return vmap(_loss_of(problem), in_dims=dims)(wanted, others).sum()

        found = grad(loss)({name: samples.given[name] for name in problem.wanted})
        each = [
            [_gradients(problem, tensors, kind) for _, tensors in samples]
            for kind in (torch.float64, dtype)
        ]
        for name, grads in found.items():
            dim = dims[0][name]
            exact, rough = (torch.stack([one[name] for one in many], dim or 0) for many in each)
            if dim is None:
                exact, rough = exact.sum(0), rough.sum(0)
            sdpa.check(grads, exact, rough, f"{problem}: gradient of {name}, {batched} batched")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_samples_of_samples(problem, device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    for batched in (next(problem.subsets()), list(problem.subsets())[-1]):
        names = tuple(problem.tensors(dtype, device, 0))
        samples = Samples(problem, [(2, batched), (3, names)], dtype, device)
        found = _parts(samples.mapped(lambda tensors: problem.ours(**tensors), samples.names))
        _check_results(problem, samples, found)
        if problem.wanted:
            groups = problem.wanted, _others(problem, samples)
            _check_gradients(problem, samples, samples.mapped(grad(_loss_of(problem)), *groups))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_one_sample_and_none(problem, device):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    names = tuple(problem.tensors(dtype, device, 0))
    one = Samples(problem, [(1, names)], dtype, device)
    found = _parts(one.mapped(lambda tensors: problem.ours(**tensors), names))
    _check_results(problem, one, found)
    none = Samples(problem, [(0, names)], dtype, device)
    for of_one, of_none in zip(
        found, _parts(none.mapped(lambda tensors: problem.ours(**tensors), names)), strict=True
    ):
        assert of_none.shape == (0, *of_one.shape[1:])
        assert (of_none.dtype, of_none.device) == (of_one.dtype, of_one.device)
    if problem.wanted:
        groups = problem.wanted, _others(problem, one)
        _check_gradients(problem, one, one.mapped(grad(_loss_of(problem)), *groups))
        for name, grads in none.mapped(grad(_loss_of(problem)), *groups).items():
            assert grads.shape == (0, *one.problem.tensors(dtype, device, 0)[name].shape)
