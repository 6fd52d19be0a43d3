"""vmap rules: what all of them share. Those of the families are in the files beside this one.

A rule gets the call of all samples at once and makes one call of it, in which the samples are part
of the batch, of the rows, of the heads or of the channels. It calls operators, which torch sends on
to whatever surrounds the vmap: another vmap, grad, a compiler, the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cudnn_ops.ops.arguments import bind

_ops = torch.ops.cudnn_ops
_keys = torch._C.DispatchKey
# One for all rules: torch.library.impl would make one for each, in ten times the time.
_library = torch.library.Library("cudnn_ops", "FRAGMENT")

Results = Tensor | tuple[Tensor, ...]

_BELOW_VMAP = torch._C.DispatchKeySet(_keys.FuncTorchBatched) | torch._C.DispatchKeySet(
    _keys.FuncTorchVmapMode
)


class Samples:
    """The call of all samples.

    Attributes:
        op: the operator.
        size: how many samples there are.
        randomness: of the vmap, "error", "same" or "different".
        batched: names of the arguments that each sample has its own of.
        call: the arguments by name; those that are batched have the samples in front.
    """

    def __init__(self, op: Any, size: int, randomness: str, call: SimpleNamespace) -> None:
        self.op, self.size, self.randomness, self.call = op, size, randomness, call
        self.batched: set[str] = set()

    def unwrap(self, level: int) -> None:
        """Takes the arguments apart that are batched by the vmap of a level."""
        own: dict[int, Tensor] = {}  # one tensor for two arguments stays one
        for name, value in vars(self.call).items():
            if not isinstance(value, Tensor):
                continue
            tensor, dim = torch._C._functorch._unwrap_batched(value, level)
            if dim is not None:
                self.batched.add(name)
                tensor = own.setdefault(id(value), tensor.movedim(dim, 0))
            setattr(self.call, name, tensor)

    def has(self, *names: str) -> bool:
        """Whether one of the arguments is batched."""
        return not self.batched.isdisjoint(names)

    def full(self, name: str) -> Any:
        """An argument with the samples in front, also if it is one for all; None stays None."""
        value = getattr(self.call, name)
        if name in self.batched or value is None:
            return value
        return value.expand(self.size, *value.shape)

    def folded(self, name: str) -> Any:
        """An argument with the samples as part of its first dimension; None stays None."""
        value = self.full(name)
        return None if value is None else value.flatten(0, 1)

    def run(self, **changes: Any) -> Any:
        """One call of the operator, with other arguments where they are given."""
        return self.op(**{**vars(self.call), **changes})

    def drop(self, name: str) -> None:
        """Makes an argument None."""
        setattr(self.call, name, None)
        self.batched.discard(name)

    def arguments_of(self, index: int) -> dict[str, Any]:
        """The arguments of a sample."""
        own: dict[int, Tensor] = {}
        arguments = dict(vars(self.call))
        for name in self.batched:
            value = arguments[name]
            arguments[name] = own.setdefault(id(value), value[index])
        return arguments

    def one(self, index: int) -> Any:
        """The call of a sample."""
        return self.op(**self.arguments_of(index))

    def each(self) -> Results:
        """A call for each sample, for what cannot be one."""
        results = [self.one(index) for index in range(self.size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results)
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    def none(self, like: Tensor) -> Tensor:
        """A result that is not wanted: an empty tensor for each sample."""
        return like.new_empty(self.size, 0)

    def _empty(self) -> Results:
        """The results of no samples, of the shapes that fake kernels tell."""
        tensors = {n: t for n, t in vars(self.call).items() if isinstance(t, Tensor)}
        device = next(iter(tensors.values())).device
        one = {
            name: tensor.new_empty(tensor.shape[name in self.batched :], device="meta")
            for name, tensor in tensors.items()
        }

        def none_of(result: Tensor) -> Tensor:
            return torch.empty((0, *result.shape), dtype=result.dtype, device=device)

        results = self.run(**one)
        if isinstance(results, Tensor):
            return none_of(results)
        return tuple(map(none_of, results))

    def results(self, rule: Rule) -> Results:
        """What the rule gives; a mistake raises what it raises in one sample."""
        if self.size == 0:
            return self._empty()
        try:
            return rule(self)
        except Exception as error:
            problem = error
        self.one(0)
        raise problem


#: A function of the call of all samples; its results have the samples in front.
Rule = Callable[[Samples], Results]


def _never(_: SimpleNamespace) -> bool:
    return False


def register_rule(
    name: str, rule: Rule, *, draws: Callable[[SimpleNamespace], bool] = _never
) -> None:
    """Makes ``rule`` what an operator does under vmap.

    Args:
        name: of the operator.
        rule: the rule.
        draws: whether a call, given by its arguments, draws random numbers: the samples of a vmap
            with ``randomness="different"`` then differ though no argument does.
    """
    op = getattr(_ops, name).default

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Imported late: torch imports it with torch.func, and not every program needs that.
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        interpreter: Any = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        call = bind(op, args, kwargs)
        samples = Samples(op, interpreter.batch_size(), interpreter.randomness(), call)
        with torch._C._ExcludeDispatchKeyGuard(_BELOW_VMAP):
            samples.unwrap(level)
            is_one_for_all = not samples.batched and (
                samples.randomness == "same" or not draws(call)
            )
            results = samples.run() if is_one_for_all else samples.results(rule)
        if is_one_for_all:
            return results
        if isinstance(results, Tensor):
            return torch._C._functorch._add_batch_dim(results, 0, level)
        return tuple(torch._C._functorch._add_batch_dim(result, 0, level) for result in results)

    _library.impl(name, kernel, "FuncTorchBatched")
    if draws is not _never:
        _library.impl(name, kernel, "FuncTorchVmapMode")


def register_refusal(name: str, message: str) -> None:
    """Makes an operator raise under vmap, where an argument is batched."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(message)

    _library.impl(name, refuse, "FuncTorchBatched")


def register_composites(*names: str) -> None:
    """Makes operators that only call others do so under vmap too."""
    composite = _keys.CompositeImplicitAutograd
    for name in names:
        packet = getattr(_ops, name)
        for overload in map(partial(getattr, packet), packet.overloads()):
            _library.impl(overload, partial(overload._op_dk, composite), "FuncTorchBatched")
