"""Batch norms folded into the weights and biases of convolutions, many at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import batch_norm_fold as cases
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_results(case: cases.Case, device: str) -> None:
    cases.check(case, lambda tensor: tensor.to(device), lambda tensor: tensor.cpu())


def _given(device: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Two convolutions, of which the second has neither a bias nor an affine norm."""
    weights = [torch.randn(4, 3, 3, 3, dtype=dtype), torch.randn(5, 4, 1, dtype=dtype)]
    means, vars = ([torch.rand(size, dtype=dtype) for size in (4, 5)] for _ in range(2))
    some = [torch.rand(4, dtype=dtype), None]
    lists: list[list[Any]] = [weights, some, means, vars, some, some]
    return [
        *([x if x is None else x.to(device) for x in one] for one in lists),
        [1e-5, 1e-3],
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    torch.library.opcheck(_ops._fold_batch_norms.default, tuple(_given(device)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("place", "wrong", "error", "message"),
    [
        (1, [None], ValueError, "every list must have 2 items, got 1"),
        (6, [1e-5] * 3, ValueError, "every list must have 2 items, got 3"),
        (2, [torch.ones(5)] * 2, ValueError, r"must be \[4\], on its device; got \[5\]"),
        (3, [torch.ones(4).half(), torch.ones(5)], TypeError, "is Float and what .* to it Half"),
        (0, [torch.ones(4, 3), torch.ones(5, 4, 1)], ValueError, "3 to 5 dimensions, got .4, 3"),
        (0, [torch.ones(4, 3, 1).double()] * 2, TypeError, "on a GPU; got Double"),
        (0, [torch.ones(4, 3, 1), torch.ones(5, 4, 1).half()], TypeError, "got Float and Half"),
    ],
)
def test_bad_input(place: int, wrong: list[Any], error: type[Exception], message: str) -> None:
    given = _given("cuda")
    given[place] = [x.cuda() if isinstance(x, torch.Tensor) else x for x in wrong]
    with pytest.raises(error, match=f"_fold_batch_norms: .*{message}"):
        _ops._fold_batch_norms.default(*given)
