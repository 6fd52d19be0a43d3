"""``cudnn_ops.fallback``: torch's operators where those of this package refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cudnn_ops.ops.decomposition import decompositions

log = logging.getLogger("cudnn_ops.fallback")

_NAMESPACE = "cudnn_ops"
#: What an operator raises where it does not support what is right in itself.
_REFUSALS = (NotImplementedError, TypeError)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_KEPT_GRAPHS = 256
#: Kernels that return a log-sum-exp where they are asked for it, and by which argument.
_WITH_SUMS = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
_COMPUTE_LOG_SUMEXP = 4


@dataclass
class FallbackRow:
    """Calls of one operator that ran by torch's, with the same shapes and for the same reason."""

    op: str
    """The operator."""
    shapes: str
    """Those of its tensors, with their dtypes, in the order of its arguments."""
    reason: str
    """What the operator said."""
    calls: int = 0


@dataclass
class FallbackReport:
    """What ran by torch's operators in a context of :func:`cudnn_ops.fallback`."""

    rows: list[FallbackRow] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """All of them."""
        return sum(row.calls for row in self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "no call ran by torch's operators"
        return "\n".join(
            f"{row.calls} x {row.op} of {row.shapes} ran by torch's operators: {row.reason}"
            for row in self.rows
        )

    def _add(self, op: str, shapes: str, reason: str) -> None:
        for row in self.rows:
            if (row.op, row.shapes, row.reason) == (op, shapes, reason):
                row.calls += 1
                return
        self.rows.append(FallbackRow(op, shapes, reason, 1))
        log.warning("%s of %s runs by torch's operators: %s", op, shapes, reason)


@contextmanager
def fallback(to: Literal["torch"]) -> Iterator[FallbackReport]:
    """A context in which torch's operators compute what those of this package refuse.

    Outside of it an operator that does not support a call raises, and never runs slower than it
    says. In it such a call (NotImplementedError, or TypeError for a dtype) runs by the operators of
    :func:`cudnn_ops.decompositions`, with the same results up to rounding and with torch's own
    derivatives. Calls that are wrong raise as before, and so do those without a decomposition:
    dropout, ``batch_norm`` in training, what writes to its arguments, and calls inside of
    ``torch.func``'s transforms.

    Each is counted, and the first of a kind is logged as a warning of ``cudnn_ops.fallback``. It is
    for programs that must run: attention then computes and keeps all scores, and the first call of
    a shape takes milliseconds of the host's.

    It is about calls of this thread in eager mode. What a compiled function calls is decided when
    it runs, outside of its context: there nothing changes. Nor does it where the forward is
    supported and the backward refuses, which :func:`cudnn_ops.support.explain` says beforehand.

    Args:
        to: ``"torch"``.

    Yields:
        A :class:`FallbackReport`, which grows.

    Raises:
        ValueError: another ``to``.

    Example:
        >>> import torch, cudnn_ops
        >>> x, angles = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8, requires_grad=True)
        >>> with cudnn_ops.fallback("torch") as taken:  # of angles rotary_embedding has no gradient
        ...     out = cudnn_ops.rotary_embedding(x, angles.cos(), angles.sin())
        >>> torch.autograd.grad(out.sum(), angles)[0].shape, taken.calls
        (torch.Size([1, 5, 8]), 1)
    """
    if to != "torch":
        raise ValueError(f"cudnn_ops.fallback: to must be 'torch', got {to!r}")
    report = FallbackReport()
    with _Fallback(report):
        yield report


class _Fallback(TorchFunctionMode):
    """Sees each call above autograd, so that torch's derivatives are those of what runs."""

    def __init__(self, report: FallbackReport) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # nothing refuses then
            return func(*args, **kwargs)
        if not isinstance(func, _OPERATORS) or _namespace_of(func) != _NAMESPACE:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except _REFUSALS as refusal:
            call = _Call.of(func, args, kwargs)
            graph = None if call is None else _graph_of(_Keyed(call))
            if call is None or graph is None:
                raise
            with torch.autocast(call.tensors[0].device.type, enabled=False):  # the graph has it
                out = graph(*call.tensors)
            reason = str(refusal).partition("\n")[0]
            self._report._add(call.name, ", ".join(map(_words, call.tensors)), reason)
            return out


def _namespace_of(func: Any) -> str:
    return _name_of(func).partition(".")[0]


def _name_of(func: Any) -> str:
    """Without the overload."""
    name: str = func._schema.name if isinstance(func, torch._ops.OpOverload) else str(func)
    return name.replace("::", ".")


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _Call(NamedTuple):
    """A call of an operator, taken apart."""

    func: Callable[..., Any]
    name: str
    tensors: list[Tensor]
    leaves: tuple[Any, ...]  # the others; None where a tensor was
    places: tuple[int, ...]  # of the tensors
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """None where torch's operators must not stand in.

        That is for integers, for subclasses, and inside of transforms of torch.func, whose tensors
        a trace would take for constants.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        tensors = [leaves[i] for i in places]
        if not tensors or not tensors[0].is_floating_point():
            return None
        if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
            return None
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            return None
        others = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
        namespace, name = _name_of(func).split(".")
        return cls(func, f"{namespace}.{name.lstrip('_')}", tensors, others, places, spec)

    def again(self, tensors: Sequence[Tensor]) -> Any:
        """The same call of other tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def key(self) -> tuple[Any, ...]:
        """What the graph depends on."""
        facts = [(t.shape, t.stride(), t.dtype, t.device) for t in self.tensors]
        kind = self.tensors[0].device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        return self.func, self.leaves, self.places, repr(self.spec), tuple(facts), autocast


class _Keyed:
    """A call, as equal as its graph."""

    def __init__(self, call: _Call) -> None:
        self.call: _Call | None = call
        """None once it has a graph, which keeps no tensors."""
        self._key = call.key()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self._key == other._key


@lru_cache(_KEPT_GRAPHS)
def _graph_of(keyed: _Keyed) -> Callable[..., Any] | None:
    """A function of the call's tensors, in torch's operators; None where there is none."""
    # Here, for it takes long to import.
    from torch.fx.experimental.proxy_tensor import make_fx

    call, keyed.call = keyed.call, None
    assert call is not None
    try:
        with torch.no_grad():
            dtypes = _dtypes_of(call)

            def run(*tensors: Tensor) -> Any:
                results = call.again(tensors)
                return results if dtypes is None else pytree.tree_map(Tensor.to, results, dtypes)

            table: dict[Any, Callable[..., Any]] = {**decompositions()}
            trace = make_fx(run, table, tracing_mode="fake")
            graph = trace(*(tensor.detach() for tensor in call.tensors))
    except Exception as error:  # whatever it is, the caller is told of the refusal
        log.debug("%s has no graph in torch's operators", call.name, exc_info=error)
        return None
    _keep_sums(graph)
    targets = (node.target for node in graph.graph.nodes)
    if any(isinstance(op, _OPERATORS) and _namespace_of(op) == _NAMESPACE for op in targets):
        return None
    return graph


def _keep_sums(graph: fx.GraphModule) -> None:
    """Has attention's kernels return what their backwards need, which a trace does not ask for."""
    for node in graph.graph.nodes:
        if node.target in _WITH_SUMS:
            node.update_arg(_COMPUTE_LOG_SUMEXP, True)
    graph.recompile()


def _dtypes_of(call: _Call) -> Any:
    """Those of the operator's own results, which under autocast differ from what it is given.

    None where it refuses these dtypes, so that it has no results.
    """
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor.detach()) for tensor in call.tensors]
    try:
        with mode:
            return pytree.tree_map(lambda result: result.dtype, call.again(fakes))
    except _REFUSALS:
        return None
