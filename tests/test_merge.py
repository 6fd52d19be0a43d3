"""Merging attention over more keys into what is there, in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cudnn_ops.ops.merge import merge_attention_state_
from tests.cases import merge
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", merge.CASES, ids=str)
def test_results(case: merge.Case, device: str) -> None:
    merge.check(case, lambda tensor: tensor.to(device), lambda tensor: tensor.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_log_sum_exps_that_are_no_numbers(device: str) -> None:
    merge.check_what_is_no_number(lambda tensor: tensor.to(device), lambda tensor: tensor.cpu())


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_rounded_once(device: str) -> None:
    """A state of 16 bits gets what one of float32 would be rounded to."""
    torch.manual_seed(0)
    out, part = (torch.randn(1, 2, 50, 64, device=device).bfloat16() for _ in range(2))
    lse, part_lse = (torch.randn(1, 2, 50, device=device) for _ in range(2))
    wide = out.float()
    merge_attention_state_(wide, lse.clone(), part, part_lse)
    merge_attention_state_(out, lse, part, part_lse)
    assert torch.equal(out, wide.bfloat16())


def _given() -> dict[str, Tensor]:
    out, lse = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, 5)
    return {"out": out, "lse": lse, "part": out.clone(), "part_lse": lse.clone()}


@pytest.mark.parametrize(
    ("name", "wrong", "error", "message"),
    [
        ("part", torch.zeros(2, 3, 5, 7), ValueError, "of one shape, got .*5, 8.* and .*5, 7"),
        ("out", torch.zeros(3, 5, 8), ValueError, "must be .batch, heads, length, head size"),
        ("lse", torch.zeros(2, 5, 3), ValueError, "lse and part_lse must be .2, 3, 5., got"),
        ("part_lse", torch.zeros(2, 3, 5).double(), TypeError, "lse is Float and part_lse Double"),
        ("out", torch.zeros(2, 3, 5, 8).half(), TypeError, "out must be of part's dtype, Float"),
    ],
)
def test_bad_input(name: str, wrong: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"_merge_attention_state_: .*{message}"):
        merge_attention_state_(**_given() | {name: wrong})


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    given = [tensor.to(device).bfloat16() for tensor in _given().values()]
    given[1], given[3] = given[1].float(), given[3].float()
    torch.library.opcheck(_ops._merge_attention_state_.default, tuple(given))


@pytest.mark.gpu
def test_what_a_gpu_does_not_merge() -> None:
    given = {name: tensor.cuda() for name, tensor in _given().items()}
    with pytest.raises(TypeError, match="must be float16 or bfloat16 on a GPU, and lse float32"):
        merge_attention_state_(**given)
    given |= {name: given[name].half() for name in ("out", "part")}
    given["part"] = given["part"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="must have a last stride of 1, got 1 and 5"):
        merge_attention_state_(**given)
