"""Steps of whole models, held to the same model in float32: benchmarks `zoo` and `diffusion`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.harness import OURS
from benchmarks.turns import nobody_timed, stopwatch
from benchmarks.zoo_models import Entry

# Of a result's error in eager mode, with a floor for what eager mode gets right by chance.
TIMES_EAGER, FLOOR = 2.0, 1e-3
#: What models call the probability by which they drop numbers, rows or whole branches.
PROBABILITIES = ("p", "drop_prob", "dropout")

#: Elements whose error is computed at a time.
_PIECE = 2**26

Step = Callable[[], Tensor]


def checked_steps(
    case: str,
    entry: Entry,
    trains: bool,
    device: str,
    variants: Callable[[nn.Module], Mapping[str, Any]],
) -> tuple[dict[str, Step], dict[str, float]]:
    """A step of each variant of a model in bfloat16, whose results are right.

    To be held to float32 in training, a model that drops numbers at random has to drop none, and is
    compiled once more. Of what is compiled, ours alone is: max-autotune takes minutes.

    Args:
        case: what errors call it.
        entry: the model.
        trains: whether a step has a backward, and gradients are held to float32, too.
        device: where.
        variants: makes them of the model, by names.

    Returns:
        the steps, and how many seconds the first one of each took.

    Raises:
        RuntimeError: a variant is off by more than twice the error of eager mode.
    """
    torch.manual_seed(0)
    reference = entry.make(torch.device(device))
    inputs = entry.inputs(torch.device(device))
    learn_statistics(reference, in_float32(inputs))
    reference.train(trains)
    model = copy.deepcopy(reference).to(torch.bfloat16)
    # A model needs most memory in float32, so one process at a time has its model there.
    with nobody_timed():
        with nothing_dropped(reference), nothing_dropped(model):
            # In the host's memory: where a model has billions of weights, others need the GPU's.
            exact = [x.cpu() for x in results_of(entry, reference, in_float32(inputs), trains)]
            eager = results_of(entry, model, inputs, trains)
        allowed = allowed_errors(eager, exact)
        del reference, eager  # gigabytes, where a model has billions of weights
        if device == "cuda":
            torch.cuda.empty_cache()
    drops = trains and any(value > 0 for *_, value in probabilities(model))
    steps: dict[str, Step] = {}
    seconds: dict[str, float] = {}
    for name, variant in variants(model).items():
        step = steps[name] = step_of(entry, variant, inputs, trains)
        seconds_since = stopwatch()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[name] = seconds_since()
        if name == OURS or not (drops and isinstance(variant, OptimizedModule)):
            with nothing_dropped(model) if drops else nullcontext():
                found = results_of(entry, variant, inputs, trains)
            hold(f"{case}: {name}", found, exact, allowed)
            del found
        if device == "cuda":
            torch.cuda.empty_cache()  # for those that compile beside it
    return steps, seconds


def allowed_errors(eager: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Of each result, by those of eager mode."""
    return [TIMES_EAGER * error(*pair) + FLOOR for pair in zip(eager, exact, strict=True)]


def hold(
    name: str, found: Sequence[Tensor], exact: Sequence[Tensor], allowed: Sequence[float]
) -> None:
    """Raises RuntimeError where a result, or the gradients behind it, are off by more."""
    for what, mine, right, most in zip(
        ("result", "gradients"), found, exact, allowed, strict=False
    ):
        off = error(mine, right)
        if not off <= most:  # written so that NaN fails
            raise RuntimeError(f"{name} is off by {off:.2g} in its {what}; allowed: {most:.2g}")


def learn_statistics(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Batch norms get the statistics of these inputs, as if the model had seen many of them.

    With those that they begin with, deep convolutional networks in eval mode give next to nothing.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(**inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@contextmanager
def nothing_dropped(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model drops nothing at random."""
    kept = list(probabilities(model))
    for module, name, _ in kept:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """By which a model's modules drop, with their names."""
    for module in model.modules():
        for name in PROBABILITIES:
            value = vars(module).get(name)
            if isinstance(value, float) and (name != "p" or is_dropout(module)):
                yield module, name, value


def is_dropout(module: nn.Module) -> bool:
    """Whether its ``p`` is a probability: poolings have exponents of that name."""
    kind = type(module).__name__
    return "Drop" in kind or kind == "StochasticDepth"


def step_of(entry: Entry, model: Any, inputs: Mapping[str, Any], trains: bool) -> Step:
    def infer() -> Tensor:
        with torch.no_grad():
            return entry.result(model(**inputs))

    def train() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        result = entry.result(model(**inputs))
        # The sum of what a norm returns does not depend on what it is given, nor does that of
        # the squares.
        result.float().sin().mean().backward()
        return result.detach()

    parameters = list(model.parameters()) if trains else []
    return train if trains else infer


def results_of(entry: Entry, model: Any, inputs: Mapping[str, Any], trains: bool) -> list[Tensor]:
    """The result, and in training all gradients as one vector."""
    found = [step_of(entry, model, inputs, trains)()]
    if trains:
        # Compiled, what the result does not depend on has a gradient of zeros.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append(torch.cat([grad.flatten() for grad in grads]))
        model.zero_grad()
    return found


def in_float32(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def error(result: Tensor, exact: Tensor) -> float:
    """As a share of the exact result's norm.

    It is computed by pieces, where ``result`` is: billions of weights leave no memory for the
    difference of all gradients. ``exact`` may be in the host's memory.

    Raises:
        RuntimeError: the shapes differ.
    """
    if result.shape != exact.shape:
        raise RuntimeError(f"a result is {list(result.shape)}, not {list(exact.shape)}")
    squares = []
    for mine, right in zip(*(x.flatten().split(_PIECE) for x in (result, exact)), strict=True):
        there = right.to(mine.device)
        squares.append(((mine.float() - there).norm().item() ** 2, there.norm().item() ** 2))
    off, size = (sum(column) for column in zip(*squares, strict=True))
    return math.sqrt(off / size) if size else math.nan
