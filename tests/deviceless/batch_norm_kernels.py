"""Runs batch norm's kernels of training, thread by thread; prints as JSON what was wrong.

LD_PRELOAD=fake_runtime.so python -m tests.deviceless.batch_norm_kernels fake_runtime.so
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from cudnn_ops.ops.batch_norm import BatchNormActivation
from tests.cases import batch_norm as cases
from tests.cases.batch_norm import BatchNormCase, Tensors
from tests.cases.group_norm import channels_last
from tests.cases.sdpa import check as check_result
from tests.deviceless.cpu_kernels import Kernels, from_gpu, to_gpu

_ops = torch.ops.cudnn_ops
#: Rows, lines, images and volumes, of few channels and of more than a block has.
SHAPES = ((9, 24, 7, 5), (130, 8), (3, 64, 29), (2, 40, 3, 4, 5), (2, 4136, 1, 3), (40, 64, 31, 5))
SUMS: tuple[tuple[bool, BatchNormActivation], ...] = (
    (False, "none"),
    (False, "relu"),
    (True, "relu"),
    (True, "none"),
)
CASES = (
    *(
        BatchNormCase(shape, activation=activation, residual=residual, layout="last")
        for shape, (residual, activation) in product(SHAPES, SUMS)
    ),
    BatchNormCase((3, 16, 9, 4), activation="relu", weight="", bias="", layout="last"),
    BatchNormCase((3, 16, 9, 4), activation="relu", weight="same", bias="same", layout="last"),
    BatchNormCase((3, 16, 9, 4), running="", momentum=1.0, layout="last"),
    BatchNormCase((3, 16, 9, 40), running="same", momentum=1.0, layout="last", shift=50.0),
)
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def check(case: BatchNormCase, dtype: torch.dtype) -> None:
    t = cases.make(case, dtype, "cpu", seed=1)
    image = t.input.detach()
    t = replace(t, input=channels_last(image).requires_grad_())
    exact, rough = (cases.reference(case, t, kind) for kind in (torch.float64, dtype))
    for name, found in results(case, t).items():
        check_result(found, exact[name], rough[name], f"{case} {name}")


def results(case: BatchNormCase, t: Tensors) -> dict[str, Tensor]:
    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else to_gpu(tensor.detach())

    x, weight, bias, residual = map(placed, (t.input, t.weight, t.bias, t.residual))
    running = placed(t.running_mean), placed(t.running_var)
    activation = int(case.activation == "relu")
    numbers = case.momentum, case.eps, activation
    out, mean, rstd = _ops._batch_norm_training(x, *running, weight, bias, residual, *numbers)
    # As the derivative: what a ReLU let pass is told by the input, or else by the output.
    of_relu = out if activation and case.residual else None
    mask = (True, weight is not None, bias is not None, of_relu is not None)
    saved = (x, weight, bias if of_relu is None else None, of_relu, mean, rstd, True, activation)
    kinds = {None if tensor is None else tensor.dtype for tensor in (weight, bias)}
    in_dtype, grad_out = kinds <= {None, t.input.dtype}, to_gpu(channels_last(t.grad_out))
    grads = _ops._batch_norm_backward(grad_out, *saved, mask, in_dtype)
    if of_relu is not None:
        frozen = _ops._batch_norm_backward(grad_out, *saved, (*mask[:3], False), in_dtype)
        assert torch.equal(from_gpu(frozen[0]), from_gpu(grads[0])), "without the residual's"
        is_first = torch.rand(t.grad_out.shape) < 0.5
        parts = (to_gpu(channels_last(t.grad_out.where(one, 0))) for one in (is_first, ~is_first))
        of_two = _ops._batch_norm_backward(next(parts), *saved, mask, in_dtype, next(parts))
        for mine, right in zip(of_two, grads, strict=True):
            assert torch.equal(from_gpu(mine), from_gpu(right)), "of two gradients"
    found = {"out": out}
    names = ("input", "weight", "bias", "residual")
    found |= {n: grad for n, grad, wanted in zip(names, grads, mask, strict=True) if wanted}
    if running[0] is not None and running[1] is not None:
        found |= {"running_mean": running[0], "running_var": running[1]}
    return {name: from_gpu(tensor) for name, tensor in found.items()}


def check_equal(value: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Equal numbers are their own mean, large ones too."""
    x = channels_last(torch.full(shape, value, dtype=dtype))
    statistics = [to_gpu(torch.ones(shape[1])) for _ in "ab"]
    out, mean, _ = _ops._batch_norm_training(to_gpu(x), *statistics, None, None, None, 1.0, 1e-5, 0)
    assert not from_gpu(out).any()
    wanted = torch.full(shape[1:2], float(x.flatten()[0]))
    assert torch.equal(from_gpu(mean), wanted)
    assert torch.equal(from_gpu(statistics[0]), wanted)
    assert not from_gpu(statistics[1]).any()


def main() -> None:
    kernels = Kernels(Path(sys.argv[1]), ("batch_norm_pixels",), ("batch_norm",))

    def checks() -> Iterator[tuple[object, Callable[[], object]]]:
        for dtype in TYPES:
            for case in CASES:
                yield f"{case} {dtype}", partial(check, case, dtype)
            for value in (10000.125, 3e38, -3e38)[: 1 if dtype == torch.float16 else 3]:
                for shape in SHAPES:
                    yield f"{value} in {shape} {dtype}", partial(check_equal, value, shape, dtype)

    print(kernels.checked(checks()))


if __name__ == "__main__":
    main()
