"""Runs the backward's kernels of adaptive norms, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.adaptive_norm_kernels fake_runtime.so
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tests.cases import adaptive_norm as cases
from tests.cases import sdpa
from tests.cases.adaptive_norm import AdaptiveNormCase
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
NAMES = ("input", "update", "gate", "scale", "shift", "weight", "bias")
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(
    case: AdaptiveNormCase,
    dtype: torch.dtype,
    wanted: tuple[str, ...] = NAMES,
    has_grad_sum: bool = True,
) -> None:
    """The gradients that are wanted, of the rows of the sum where there is one."""
    t = cases.make(case, dtype, "cpu", seed=1)
    total = t.input.detach()
    if case.gated:
        exact = {name: leaf.detach().double() for name, leaf in t.leaves.items()}
        total = cases.lay_out(cases.formula(case, exact)[-1].to(dtype), case.layout)
    mean = total.double().mean(-1) * case.is_layer
    variance = total.double().square().mean(-1) - mean.square()
    rstd = (variance + case.eps).rsqrt()
    t = replace(t, grad_sum=t.grad_sum if has_grad_sum else torch.zeros_like(t.grad_sum))

    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_gpu(tensor.detach())

    rows, stats = placed(total), [to_gpu(one.float()) for one in (mean, rstd)]
    others = [placed(getattr(t, name)) for name in NAMES[1:]]
    mask = [name in t.leaves and name in wanted for name in NAMES]
    grad_sum = placed(t.grad_sum) if case.gated and has_grad_sum else None
    grads = _ops._adaptive_norm_backward(
        placed(t.grad_out), grad_sum, rows, *others, *stats, case.is_layer, mask
    )
    exact, rough = (cases.reference(case, t, total, kind) for kind in (torch.float64, dtype))
    for name, grad, is_wanted in zip(NAMES, grads, mask, strict=True):
        if is_wanted:
            sdpa.check(from_gpu(grad), exact[name], rough[name], f"{case} {name}")


def check_equal_numbers(tokens: int, columns: int, gated: bool) -> None:
    """Near the largest: what a mean is subtracted from behind a row's end must not count."""
    sizes, dtype = (2, tokens, columns), torch.bfloat16
    x = torch.full(sizes, 3e38, dtype=dtype)
    rstd = to_gpu(torch.full(sizes[:2], 1e5))
    mean = to_gpu(x[..., 0].float())
    modulation = to_gpu(torch.ones(sizes[0], columns, dtype=dtype))
    update, gate = (to_gpu(torch.zeros_like(x)), modulation) if gated else (None, None)
    given = to_gpu(x), update, gate, modulation, modulation, None, None
    mask = [True, gated, gated, True, True, False, False]
    grads = _ops._adaptive_norm_backward(
        to_gpu(torch.ones_like(x)), None, *given, mean, rstd, True, mask
    )
    wanted = [from_gpu(grad) for grad, one in zip(grads, mask, strict=True) if one]
    assert all(grad.isfinite().all() for grad in wanted)


#: Columns that no pieces of 16 bytes fit: parts of a warp, a warp with few numbers each and many,
#: and several warps.
ODD = (1, 2, 7, 50, 65, 129, 201, 257, 515, 1021, 1025, 2061)

#: Likewise, where each row is a sample: the last are more than their kernel takes.
SINGLE = (9, 257, 1021, 4099)


def cases_of(number_bytes: int) -> Iterator[tuple[AdaptiveNormCase, tuple[str, ...], bool]]:
    """Every kernel, of few samples and many, that end anywhere in a worker's rows."""
    piece = 16 // number_bytes
    layer = AdaptiveNormCase((3, 7, 8), weight="same", bias="same")
    # Parts of a warp, warps of each number of pieces, and several for a row; full and not.
    pieces = (1, 3, 20, 40, 64, 80, 96, 128, 129, 144, 160, 200, 400, 700)
    columns = (*(piece * count for count in pieces), *ODD)
    for (index, count), gated in itertools.product(enumerate(columns), (False, True)):
        # Many samples to a worker, many workers to a sample, and what one has of two of them.
        shape = ((3, 7), (1, 23), (5, 5), (2, 40), (40, 2))[index % 5]
        case = replace(layer, shape=(*shape, count), gated=gated, is_layer=index % 3 != 0)
        case = replace(case, bias=case.bias if case.is_layer else "", wide=index % 2 == 0)
        yield case, NAMES, index % 4 != 0
        yield replace(case, weight="", bias="", layout="sliced"), NAMES, True
    # So many parts of a sample that threads share a column's, and have several turns of them.
    for rows, gated in itertools.product(((2, 150), (1, 700)), (False, True)):
        yield replace(layer, shape=(*rows, rows[0] * piece), gated=gated), NAMES, True
    # Four pieces of gated sums, which only rows have that are longer than others have room for.
    yield replace(layer, shape=(2, 5, 1600 * piece), gated=True), NAMES, True
    # Longer than any.
    yield replace(layer, shape=(2, 5, 2100 * piece), gated=True), NAMES, True
    yield replace(layer, shape=(2, 3, 16_501), gated=True), NAMES, True
    yield replace(layer, shape=(2, 5, 2100 * piece)), NAMES, True
    yield replace(layer, shape=(2, 3, 16_501)), NAMES, True
    # Odd rows of more groups than a block has, and of parts of a sample.
    for rows, gated in itertools.product(((2, 150), (50, 9), (1, 90), (2, 5)), (False, True)):
        for count in (9, 257, 1333):
            yield replace(layer, shape=(*rows, count), gated=gated), NAMES, True
    # Samples of a row each.
    for count, gated in itertools.product((*(1, 5, 40, 64, 70, 300, 700), *SINGLE), (False, True)):
        for kinds in (("token",) * 3, ("token", "sample", "token"), ("sample", "token", "batch")):
            scale, shift, gate = kinds
            size = count if count in SINGLE else count * piece
            case = replace(layer, shape=(2, 5, size), gated=gated, is_layer=count != 64)
            case = replace(case, scale=scale, shift=shift, gate=gate)
            case = replace(case, bias=case.bias if case.is_layer else "", wide=count == 70)
            # What is broadcast torch adds up, which nobody does here.
            broadcast = [one for one in ("scale", "shift", "gate") if getattr(case, one) != "token"]
            own = tuple(name for name in NAMES if name not in broadcast)
            yield case, own, True
            without = tuple(name for name in own if name not in ("weight", "bias"))
            yield replace(case, layout="sliced"), without, count != 40
    # Some of the gradients alone, and no modulation.
    for count, gated in itertools.product((144 * piece, 201), (False, True)):
        case = replace(layer, shape=(3, 9, count), gated=gated)
        for wanted in (
            *(("input",), ("scale", "gate"), ("update",)),
            *(("shift", "weight"), ("bias",)),
        ):
            yield case, wanted, True
            yield replace(case, scale="token", shift="token", gate="token"), wanted, True
        if gated:
            yield replace(case, scale="", shift=""), NAMES, True


def cases_of_blocks(offset: int) -> Iterator[tuple[AdaptiveNormCase, tuple[str, ...], bool]]:
    """Blocks that add up what their groups have of samples.

    They have equal parts of these, whole ones, and what begins and ends anywhere; and their groups
    are a warp or several, full or not.
    """
    shapes = ((1, 512, 40), (8, 64, 34), (3, 200, 64), (4, 130, 80), (1, 530, 144), (9, 64, 130))
    for index, (samples, tokens, count) in enumerate(shapes):
        is_gated = (index + offset) % 2 > 0
        case = AdaptiveNormCase((samples, tokens, 8 * count), gated=is_gated, wide=index == 1)
        case = replace(case, is_layer=index % 3 != 2, layout=("dense", "sliced")[index % 2])
        yield case, NAMES, index % 2 == 0
    for wanted in (("input",), ("scale", "gate"), ("update", "shift")):
        yield replace(case, shape=(2, 300, 264), gated=True), wanted, True


#: The GPU with so many processors that a sample has parts for several warps.
_MANY = 2


def main() -> None:
    types = ("Half", "BFloat16", "Float")
    sources = [("adaptive_norm_backward", f"-DKERNEL_TYPE={one}") for one in types]
    kernels = Kernels(Path(sys.argv[1]), *sources)

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for number, dtype in enumerate(TYPES):
            kernels.first = number
            for case, wanted, has_grad_sum in cases_of(dtype.itemsize):
                name = f"{case} {dtype} {wanted} {has_grad_sum}"
                yield name, partial(check, case, dtype, wanted, has_grad_sum)
        for kernels.first, dtype in enumerate(TYPES[:2]):
            blocks = cases_of_blocks(kernels.first)
            for index, (case, wanted, has_grad_sum) in enumerate(blocks):
                gpu = (0, _MANY)[(index // 2 + kernels.first) % 2]
                name = f"{case} {dtype} {wanted} {has_grad_sum} on GPU {gpu}"
                with torch.cuda.device(gpu):
                    yield name, partial(check, case, dtype, wanted, has_grad_sum)
        kernels.first = TYPES.index(torch.bfloat16)
        for columns, gated in itertools.product((100, 1023, 1024, 4099), (False, True)):
            name = f"equal numbers, {columns} columns, gated: {gated}"
            yield name, partial(check_equal_numbers, 3, columns, gated)
            if columns == 1024:
                yield f"{name}, by blocks", partial(check_equal_numbers, 256, columns, gated)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
