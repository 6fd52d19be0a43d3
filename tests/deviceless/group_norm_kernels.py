"""Runs the kernels of group norm, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.group_norm_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_ops.ops.group_norm import NormActivation
from tests.cases import group_norm as cases
from tests.cases import sdpa
from tests.cases.group_norm import GroupNormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
#: Images whose groups fit into a block, and such that are shared by several; all orders of both.
SHAPES = (
    ((2, 40, 12, 16), 4),
    ((2, 24, 8, 8), 3),
    ((1, 6, 5, 7), 2),
    ((3, 64, 3), 32),
    ((1, 16, 130, 112), 2),
    ((2, 12, 181, 64), 3),
    ((1, 10, 211, 99), 1),
)
#: Groups that stay in registers: parts of a warp, warps and blocks of several; of one channel, of
#: rows of channels that are a part of a sector, planes whose pieces have two channels, and numbers
#: in no vectors.
HELD = (
    ((256, 512), 32),
    ((3, 64), 8),
    ((5, 96, 7, 7), 12),
    ((66, 64, 7, 7), 8),
    ((1, 320, 8, 8), 32),
    ((2, 64, 16, 16), 32),
    ((3, 8, 9, 11), 8),
    ((2, 16, 5), 4),
    ((1, 12, 7, 9), 4),
    ((2, 20, 41, 13), 4),
    ((1, 40, 64, 32), 2),
    ((1, 24, 64, 64), 2),
    ((1, 3, 25, 27), 1),
    ((1, 6, 19, 25), 1),
    ((1, 6, 61, 25), 1),
    ((2, 6, 45, 30), 1),
)
#: Samples, or groups, in parts of blocks that wait for each other, in shared memory as a whole and
#: not; pieces of one group, of parts of two and of several, and of a group a channel.
RESIDENT = (
    ((1, 40, 50, 48), 4),
    ((1, 64, 45, 41), 32),
    ((1, 24, 60, 58), 24),
    ((1, 24, 61, 58), 8),
    ((2, 24, 181, 64), 3),
    ((1, 8, 96, 112), 1),
    ((1, 12, 60, 90), 1),
    ((1, 8, 250, 130), 1),
)
#: Groups that clusters of one block, or of two, keep on a GPU of few processors, by their order;
#: and those of four and eight, on a large one: pieces of one group and of parts of two, samples as
#: a whole and in strips.
FEW_CLUSTERS = (
    ((2, 24, 181, 64), 3, "first"),
    ((3, 8, 64, 48), 1, "first"),
    ((2, 64, 28, 28), 8, "last"),
    ((3, 48, 25, 27), 4, "last"),
    ((1, 128, 28, 28), 16, "last"),
)
MANY_CLUSTERS = (
    ((1, 24, 64, 48), 3, "first"),
    ((1, 36, 61, 56), 2, "first"),
    ((1, 128, 40, 30), 2, "last"),
    ((1, 48, 57, 49), 4, "last"),
)
ACTIVATIONS: tuple[NormActivation, ...] = ("none", "silu")
#: Whether something is added before them too.
SUMS: tuple[tuple[NormActivation, bool], ...] = (("silu", False), ("none", True))
CASES = (
    *(
        GroupNormCase(shape, groups, activation, layout=layout, residual=residual)
        for (shape, groups), activation, layout, residual in product(
            SHAPES, ACTIVATIONS, ("first", "last"), (False, True)
        )
    ),
    *(
        GroupNormCase(shape, groups, activation, layout=layout, residual=residual, weight="float32")
        for (shape, groups), (activation, residual), layout in product(
            HELD, SUMS, ("first", "last")
        )
    ),
    # Too large for registers, and not for shared memory.
    GroupNormCase((1, 10, 131, 64), 1, "silu"),
    GroupNormCase((1, 10, 61, 64), 1, "silu"),
    *(
        GroupNormCase(shape, 1, "silu", layout=layout)
        for shape, layout in product(((1, 3, 4, 2003), (1, 4, 73, 83)), ("first", "last"))
    ),
    GroupNormCase((4, 64, 7, 7), 8, "silu", layout="flat", weight="", shift=300.0),
    # In pieces of 8 bytes, of which an odd number is a channel.
    GroupNormCase((2, 24, 4, 3), 3),
    GroupNormCase((1, 8, 28, 1109), 2, "silu"),
    GroupNormCase((2, 48, 9, 8), 4, weight="", bias=""),
    GroupNormCase((2, 48, 9, 8), 4, "silu", weight="float32", bias="float32", layout="last"),
    GroupNormCase((2, 40, 32, 32), 4, "silu", shift=300.0, weight="float32"),
)
RESIDENT_CASES = (
    *(
        GroupNormCase(shape, groups, "silu", layout=layout, residual=residual, bias="float32")
        for (shape, groups), (layout, residual) in product(
            RESIDENT, (("first", False), ("last", True), ("last", False))
        )
    ),
    GroupNormCase((1, 8, 250, 130), 1, layout="first", weight="", bias="", residual=True),
    GroupNormCase((1, 64, 45, 41), 4, layout="last", weight="float32", shift=300.0),
)
#: The gradients likewise, and of blocks with a whole group that is too large for them: of weights
#: in either type or none, of groups that pieces share, of channels in one turn and in several.
RESIDENT_BACKWARD_CASES = (
    *(
        GroupNormCase(shape, groups, activation, layout=layout, residual=residual)
        for (shape, groups), (activation, residual), layout in product(
            RESIDENT, SUMS, ("first", "last")
        )
    ),
    *(
        GroupNormCase(shape, groups, "silu", layout="first", weight=weight, bias="float32")
        for (shape, groups), weight in product(
            (((1, 80, 40, 48), 1), ((3, 10, 64, 160), 1), ((1, 37, 31, 88), 1)), ("", "float32")
        )
    ),
    GroupNormCase((1, 40, 50, 48), 4, "silu", layout="last", weight="", bias=""),
    GroupNormCase((2, 48, 37, 41), 4, "silu", layout="last", weight="float32", shift=30.0),
    GroupNormCase((2, 24, 61, 58), 8, layout="last", bias="float32", residual=True),
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: How far from zero a result of SiLU may be that is as good as zero.
_TINY = {torch.float16: 6e-8, torch.bfloat16: 1e-12, torch.float32: 4e-6}


def placed(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else to_gpu(tensor.detach())


def activation_of(case: GroupNormCase) -> int:
    return 2 if case.activation == "silu" else 0


def check(case: GroupNormCase, dtype: torch.dtype) -> None:
    t = cases.make(case, dtype, "cpu", seed=1)
    x, residual, weight, bias = map(placed, t.leaves)
    activation = activation_of(case)
    call = (x, residual, case.groups, weight, bias, case.eps, activation, True)
    out, total, mean, rstd = _ops._group_norm(*call)
    results = [from_gpu(out), *([from_gpu(total)] if case.residual else [])]
    grad_sum = to_gpu(t.grad_sum) if case.residual else None
    saved = (total if case.residual else x, case.groups, weight, bias, mean, rstd, activation)
    mask = (True, weight is not None, bias is not None)
    grads = _ops._group_norm_backward(to_gpu(t.grad_out), grad_sum, *saved, mask)
    wanted = [from_gpu(grad) for grad, is_wanted in zip(grads, mask, strict=True) if is_wanted]
    cases.compare(case, t, results, wanted)


def check_extremes(dtype: torch.dtype, is_last: bool) -> None:
    """What SiLU is given may be far from zero, or no number: its neighbours are as they were."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 24, 60, 58, dtype=torch.float64, generator=generator).to(dtype)
    x = cases.channels_last(x) if is_last else x
    weight, bias = torch.ones(24), torch.linspace(-30, 30, 24)
    bias[:6] = torch.tensor([-120, 120, -1e30, 1e30, -60, 60])
    if is_last:  # each channel is a group, whose gradients no other has a part in
        bias[6:8] = torch.tensor([torch.inf, torch.nan])
    groups, known = (24, bias.isfinite()) if is_last else (1, slice(None))
    parameters = (to_gpu(weight), to_gpu(bias))
    out, _, mean, rstd = _ops._group_norm(to_gpu(x), None, groups, *parameters, 1e-5, 2, True)
    saved = (to_gpu(x), groups, *parameters, mean, rstd, 2, (True, True, True))
    grad = torch.ones_like(x)
    grads = [*map(from_gpu, _ops._group_norm_backward(to_gpu(grad), None, *saved))]
    one, two, three = (leaf.double().requires_grad_() for leaf in (x, weight, bias))
    exact = functional.silu(functional.group_norm(one, groups, two, three, 1e-5))
    of_input, of_weight, of_bias = torch.autograd.grad(exact, (one, two, three), grad.double())
    most, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    # Far below zero an argument's last digit is several of the result's.
    few = max(eps, 1e-5)
    out = from_gpu(out).double().clamp(max=most)
    right = exact.detach()[:, known].clamp(max=most)
    torch.testing.assert_close(out[:, known], right, rtol=few, atol=_TINY[dtype])
    assert not is_last or not out[:, 7].isfinite().any()
    # Where the slope is constant, what is left of the gradients is what sums lose.
    found, right = grads[0].double()[:, known], of_input[:, known]
    torch.testing.assert_close(found, right, rtol=4 * few, atol=4 * few)
    for found, right in ((grads[1], of_weight), (grads[2], of_bias)):
        torch.testing.assert_close(found.double()[known], right[known], rtol=1e-4, atol=1e-2)


def check_forward(case: GroupNormCase, dtype: torch.dtype) -> None:
    """With the statistics that a backward reads."""
    t = cases.make(case, dtype, "cpu", seed=1)
    x, residual, weight, bias = map(placed, t.leaves)
    call = (x, residual, case.groups, weight, bias, case.eps, activation_of(case), True)
    out, total, mean, rstd = map(from_gpu, _ops._group_norm(*call))
    normed = t.input.detach()
    if t.residual is not None:
        normed = normed + t.residual.detach()
        assert torch.equal(total, normed)
    wide = [None if leaf is None else leaf.detach().double() for leaf in (t.weight, t.bias)]
    narrow = [None if leaf is None else leaf.to(dtype) for leaf in wide]
    with torch.no_grad():
        exact = cases.formula(case, normed.double(), *wide)
        sdpa.check(out, exact, cases.formula(case, normed, *narrow), f"{case} out")
    groups = normed.double().reshape(case.shape[0], case.groups, -1)
    exact_rstd = (groups.var(-1, correction=0) + case.eps).rsqrt()
    torch.testing.assert_close(mean.double(), groups.mean(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=1e-6, atol=1e-6)


def check_no_number(
    value: float, shape: tuple[int, ...], groups: int, layout: str, dtype: torch.dtype
) -> None:
    """A group that has one is none, and the others are as they were."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = cases.channels_last(x) if layout == "last" else x
    outs = []
    for one in (float(x[0, 0, 0, 0]), value):
        x[0, 0, 0, 0] = one
        outs.append(_ops._group_norm(to_gpu(x), None, groups, None, None, 1e-5, 0, False)[0])
    usual, out = map(from_gpu, outs)
    own = shape[1] // groups
    assert not out[0, :own].isfinite().any()
    for others in (usual[1:], out[1:]), (usual[0, own:], out[0, own:]):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(others[1], others[0], rtol=eps, atol=eps)


def check_biases(shape: tuple[int, ...], groups: int, layout: str, dtype: torch.dtype) -> None:
    """What SiLU is given may be far from zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = cases.channels_last(x) if layout == "last" else x
    weight, bias = torch.ones(shape[1]), torch.linspace(-30, 30, shape[1])
    bias[:6] = torch.tensor([-120, 120, -1e30, 1e30, -60, 60])
    parameters = to_gpu(weight), to_gpu(bias)
    out, *_ = _ops._group_norm(to_gpu(x), None, groups, *parameters, 1e-5, 2, False)
    exact = functional.silu(
        functional.group_norm(x.double(), groups, weight.double(), bias.double(), 1e-5)
    )
    most, few = torch.finfo(dtype).max, max(torch.finfo(dtype).eps, 1e-5)
    found = from_gpu(out).double().clamp(max=most)
    torch.testing.assert_close(found, exact.clamp(max=most), rtol=few, atol=_TINY[dtype])


def check_equal(
    value: float, shape: tuple[int, ...], groups: int, is_last: bool, dtype: torch.dtype
) -> None:
    """Equal numbers are their own mean, large ones too."""
    x = torch.full(shape, value, dtype=dtype)
    x = cases.channels_last(x) if is_last and x.dim() > 2 else x
    out, *_ = _ops._group_norm(to_gpu(x), None, groups, None, None, 1e-5, 0, False)
    assert not from_gpu(out).any()


def cluster_checks(
    clusters: tuple[tuple[tuple[int, ...], int, str], ...], dtype: torch.dtype
) -> Iterator[tuple[object, Callable[[], object]]]:
    for shape, groups, layout in clusters:
        near = GroupNormCase(shape, groups, "silu", layout=layout, weight="")
        # Far from zero digits are lost at first.
        far = GroupNormCase(shape, groups, layout=layout, weight="float32", shift=30.0)
        for case in (near, far):
            yield f"{case} {dtype}", partial(check_forward, case, dtype)
        rest = (shape, groups, layout, dtype)
        words = f"{shape} {groups} {layout} {dtype}"
        for value in (torch.nan, torch.inf):
            yield f"{value} in {words}", partial(check_no_number, value, *rest)
        yield f"biases of {words}", partial(check_biases, *rest)
        for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
            equal = partial(check_equal, value, shape, groups, layout == "last", dtype)
            yield f"{value} in {words}", equal


def main() -> None:
    names = (
        *("held", "held_backward", "resident", "resident_first", "resident_last"),
        *("forward", "backward"),
    )
    narrow = (*names, "cluster")
    types = {"Half": narrow, "BFloat16": narrow, "Float": names}
    sources = [
        (f"group_norm_{name}", f"-DKERNEL_TYPE={one}") for one in types for name in types[one]
    ]
    kernels = Kernels(Path(sys.argv[1]), *sources)

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for dtype, one in zip(TYPES, types, strict=True):
            kernels.first = sources.index((f"group_norm_{names[0]}", f"-DKERNEL_TYPE={one}"))
            with torch.cuda.device(0):
                for case in RESIDENT_CASES:
                    yield f"{case} {dtype}", partial(check_forward, case, dtype)
                for case in RESIDENT_BACKWARD_CASES:
                    yield f"{case} {dtype}", partial(check, case, dtype)
                for is_last in (False, True):
                    extremes = partial(check_extremes, dtype, is_last)
                    yield f"extremes {dtype} {is_last}", extremes
                for (shape, groups), is_last in product(RESIDENT, (False, True)):
                    equal = partial(check_equal, 10000.123, shape, groups, is_last, dtype)
                    yield f"equal in {shape} {dtype} {is_last}", equal
            if dtype != torch.float32:
                for device, clusters in ((0, FEW_CLUSTERS), (3, MANY_CLUSTERS)):
                    with torch.cuda.device(device):
                        yield from cluster_checks(clusters, dtype)
            with torch.cuda.device(1):
                for case in CASES:
                    yield f"{case} {dtype}", partial(check, case, dtype)
                for value in (10000.123, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
                    for (shape, groups), is_last in product(SHAPES + HELD, (False, True)):
                        name = f"{value} in {shape} {dtype} {is_last}"
                        yield name, partial(check_equal, value, shape, groups, is_last, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
