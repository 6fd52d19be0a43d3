"""Norms, gated activations, rotary embedding: GPU time beside that of the same bytes, host time.

bf16; a training forward, and the backward with the gradients of weight and bias. All read each
number once and compute little, so that the bound is the memory's: a copy (one tensor read, one
written), or torch.add (`three_pass`) where the operator reads two and writes one.

`cudnn_ops` is a size that is called often, which may have got a plan of cuDNN's; `cudnn_ops_new`
one that is called for the first time, and every new one of many. Queries and keys are turned by
one kernel, and beside it by `two_launches`, one for each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn import functional as F

import cudnn_ops
from benchmarks import peers
from benchmarks.harness import OURS, Functions, Rows, gpu_ms, host_us, main
from benchmarks.peers import RowOps

# Of two results, as a share of the first one's norm.
TOLERANCE = 2e-2
NEW = f"{OURS}_new"
TWO_LAUNCHES = "two_launches"


class Shape(NamedTuple):
    rows: int
    width: int
    group: str
    """Which line of the table it belongs to."""
    compiled: bool = False
    """Whether torch.compile is a peer: it takes seconds a case, so only where rows are most."""


SHAPES = (
    Shape(8192, 1024, "wide"),
    Shape(32768, 1024, "wide"),
    Shape(131072, 1024, "wide", compiled=True),
    Shape(2048, 2048, "wide"),
    Shape(8192, 2048, "wide"),
    Shape(32768, 2048, "wide"),
    Shape(131072, 2048, "wide", compiled=True),
    Shape(2048, 4096, "wide"),
    Shape(8192, 4096, "wide"),
    Shape(32768, 4096, "wide", compiled=True),
    Shape(2048, 8192, "wide"),
    Shape(8192, 8192, "wide"),
    Shape(32768, 8192, "wide", compiled=True),
    Shape(8192, 16384, "wide", compiled=True),
    Shape(2048, 32768, "wide", compiled=True),
    Shape(1048576, 64, "narrow", compiled=True),
    Shape(131072, 128, "narrow"),
    Shape(1048576, 128, "narrow", compiled=True),
    Shape(131072, 256, "narrow", compiled=True),
    Shape(1, 4096, "few rows"),
    Shape(16, 4096, "few rows"),
    Shape(256, 4096, "few rows"),
    Shape(8192, 4095, "odd"),
    Shape(100000, 100, "odd"),
    Shape(100, 100000, "odd"),
)
QK = (8, 2048, 16, 128)  # batch, tokens, heads, head size
PROJECTED = 3  # of the projection that the heads are part of: query, key and value
ADDED = (8192, 4096)
GATED = (8192, 11008)
ROTARY = ((4, 2048, 32, 8, 128), (1, 512, 32, 8, 128))  # batch, tokens, heads, key heads, size
# Where a call is all that counts, and where the GPU takes as long.
HOST = ((256, 4096), (2048, 4096))


class Call(NamedTuple):
    """One implementation's forward, and what its backward gives the gradients of."""

    forward: Callable[[], Tensor | tuple[Tensor, ...]]
    leaves: Sequence[Tensor]


@dataclass(frozen=True)
class Case:
    """One operator at one shape. The bounds are one function each way; no grads: no backward."""

    name: str
    calls: Mapping[str, Call]
    forward_bound: Functions
    grads: Sequence[Tensor] = ()
    """Of the first results."""
    backward_bound: Functions | None = None


def run(rows: Rows, rounds: int) -> None:
    # There are a hundred cases and directions: fewer samples of each keep the run to minutes.
    rounds = max(rounds // 5, 1)
    # So that a compiled backward can be called again.
    with functorch_config.patch(donated_buffer=False):
        for case in cases(peers.row_ops(OURS, "eager", "liger")):
            measure(case, rows, rounds)
    measure_host(rows, rounds)


def measure(case: Case, rows: Rows, rounds: int) -> None:
    """Check every implementation against ours, then add the rows."""
    backward: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    ours: Sequence[Tensor] = ()
    for name, call in case.calls.items():
        found = call.forward()
        results = found if isinstance(found, tuple) else (found,)
        if case.grads:
            roots = results[: len(case.grads)]
            backward[name] = partial(
                torch.autograd.grad, roots, call.leaves, case.grads, retain_graph=True
            )
            results = (*results, *backward[name]())
        ours = ours or results
        verify(f"{case.name}: {name}", results, ours)
    # What the first forwards gave is needed no more, but for the graphs.
    del ours, results, found
    forward = {name: call.forward for name, call in case.calls.items()}
    directions = [("fwd", {**forward, **case.forward_bound})]
    if case.backward_bound is not None:
        directions.append(("bwd", {**backward, **case.backward_bound}))
    for which, functions in directions:
        functions[NEW] = functions[OURS]
        for name, ms in gpu_ms(functions, rounds=rounds, around=policy_of).items():
            rows.add(f"{case.name} {which}", name, "gpu_ms", ms)


def policy_of(impl: str) -> AbstractContextManager[None]:
    if impl == NEW:
        return cudnn_ops.using_plan_policy("polymorphic")
    return cudnn_ops.using_plan_policy("auto", promote_after=0)


def verify(what: str, results: Sequence[Tensor], ours: Sequence[Tensor]) -> None:
    """Raise unless all results are those of ours."""
    for place, (result, wanted) in enumerate(zip(results, ours, strict=True)):
        error = float((result.detach().float() - wanted.detach().float()).norm())
        allowed = TOLERANCE * float(wanted.detach().float().norm())
        if not error <= allowed:  # written so that NaN fails
            raise RuntimeError(f"{what} differs in result {place}: {error:.2g} > {allowed:.2g}")


def cases(ops: Mapping[str, RowOps]) -> Iterator[Case]:
    torch.manual_seed(0)
    for kind in ("rms", "layer"):
        for shape in SHAPES:
            x = random_tensor(shape.rows, shape.width).requires_grad_()
            name = f"{kind} {shape.group} {shape.rows},{shape.width}"
            yield norm_case(name, kind, x, ops, shape.compiled)
    batch, tokens, heads, size = QK
    projection = random_tensor(batch, tokens, PROJECTED * heads, size)
    heads_of_it = projection[:, :, :heads].requires_grad_()
    yield norm_case(f"rms QK {','.join(map(str, QK))}", "rms", heads_of_it, ops, compiled=True)
    yield add_case(ops)
    yield gated_case(ops)
    for sizes in ROTARY:
        yield rotary_case(*sizes)


def norm_case(name: str, kind: str, x: Tensor, ops: Mapping[str, RowOps], compiled: bool) -> Case:
    parameters = [
        random_tensor(x.shape[-1]).requires_grad_() for _ in range(2 if kind == "layer" else 1)
    ]
    leaves = (x, *parameters)
    functions = {
        impl: (row_ops.rms_norm if kind == "rms" else row_ops.layer_norm)
        for impl, row_ops in ops.items()
        if impl != "liger" or x.shape[-1] <= peers.LIGER_WIDEST
    }
    calls = calls_of(functions, leaves, compiled)
    data, grad_out = x.detach(), random_tensor(*x.shape)
    target = torch.empty_like(grad_out)
    return Case(
        name,
        calls,
        {"copy": partial(target.copy_, data)},
        [grad_out],
        {"three_pass": partial(torch.add, data, grad_out, out=target)},
    )


def add_case(ops: Mapping[str, RowOps]) -> Case:
    x, residual = (random_tensor(*ADDED).requires_grad_() for _ in range(2))
    weight = random_tensor(ADDED[1]).requires_grad_()
    functions = {impl: row_ops.add_rms_norm for impl, row_ops in ops.items()}
    calls = calls_of(functions, (x, residual, weight), compiled=True)
    # Two tensors are read, and two written.
    return Case(f"add + rms {ADDED[0]},{ADDED[1]}", calls, copy_of(2 * x.numel()))


def gated_case(ops: Mapping[str, RowOps]) -> Case:
    leaves = [random_tensor(*GATED).requires_grad_() for _ in range(2)]
    gate, up = (leaf.detach() for leaf in leaves)
    functions = {impl: row_ops.swiglu for impl, row_ops in ops.items()}
    calls = calls_of(functions, leaves, compiled=True)
    if "liger" in functions:
        # Its backward writes over the gate and up that it is given.
        own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        calls["liger"] = Call(partial(functions["liger"], *own), own)
    target = torch.empty_like(gate)
    return Case(
        f"swiglu {GATED[0]},{GATED[1]}",
        calls,
        {"three_pass": partial(torch.add, gate, up, out=target)},
        [random_tensor(*GATED)],
        # Three tensors are read, and two written.
        copy_of(5 * gate.numel() // 2),
    )


def rotary_case(batch: int, tokens: int, heads: int, key_heads: int, size: int) -> Case:
    def heads_of(count: int) -> Tensor:
        return random_tensor(batch, tokens, count, size).transpose(1, 2)

    def by_itself(x: Tensor) -> Tensor:
        return cudnn_ops.rotary_embedding(x, cos, sin)

    def by_torch(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    leaves = [heads_of(count).requires_grad_() for count in (heads, key_heads)]
    angles = random_tensor(1, tokens, size // 2).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    functions: dict[str, Callable[..., tuple[Tensor, ...]]] = {
        OURS: partial(cudnn_ops.rotary_embedding_qk, cos=cos, sin=sin),
        TWO_LAUNCHES: lambda query, key: (by_itself(query), by_itself(key)),
        "eager": lambda query, key: (by_torch(query), by_torch(key)),
    }
    bound = copy_of(sum(leaf.numel() for leaf in leaves))
    name = f"rotary_qk {batch},{tokens},{heads},{key_heads},{size}"
    grads = [heads_of(count) for count in (heads, key_heads)]
    return Case(name, calls_of(functions, leaves, compiled=True), bound, grads, bound)


def calls_of(
    functions: Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]],
    leaves: Sequence[Tensor],
    compiled: bool,
) -> dict[str, Call]:
    calls = {impl: Call(partial(f, *leaves), leaves) for impl, f in functions.items()}
    if compiled:
        # One function's shapes would run into dynamo's limit of recompilations.
        torch._dynamo.reset()
        function = torch.compile(functions["eager"], dynamic=False)
        calls["compile"] = Call(partial(function, *leaves), leaves)
    return calls


def copy_of(numbers: int) -> Functions:
    source = random_tensor(numbers)
    return {"copy": partial(torch.empty_like(source).copy_, source)}


def random_tensor(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")


def measure_host(rows: Rows, rounds: int) -> None:
    """Host time of a call of the public functions."""
    for size in HOST:
        add_host(size, rows, rounds)


def add_host(size: tuple[int, int], rows: Rows, rounds: int) -> None:
    x, up = (random_tensor(*size) for _ in range(2))
    shape = [size[1]]
    weight, bias = (random_tensor(*shape) for _ in range(2))
    calls: dict[str, Functions] = {
        "rms_norm": {
            OURS: partial(cudnn_ops.rms_norm, x, shape, weight, peers.EPS),
            "eager": partial(F.rms_norm, x, shape, weight, peers.EPS),
        },
        "layer_norm": {
            OURS: partial(cudnn_ops.layer_norm, x, shape, weight, bias, peers.EPS),
            "eager": partial(F.layer_norm, x, shape, weight, bias, peers.EPS),
        },
        "swiglu": {
            OURS: partial(cudnn_ops.swiglu, x, up),
            "eager": lambda: F.silu(x) * up,
        },
    }
    for which, needs_grad in (("no grad", False), ("grad", True)):
        for leaf in (x, up, weight, bias):
            leaf.requires_grad_(needs_grad)
        for function, impls in calls.items():
            for name, us in host_us(impls, rounds=rounds).items():
                rows.add(f"{function} {size[0]},{size[1]}, {which}", name, "host_us", us)


if __name__ == "__main__":
    main("norms", run)
