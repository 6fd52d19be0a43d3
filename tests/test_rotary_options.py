"""Rotary embedding of queries and keys, of neighbours, of parts, by positions and by sections."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cudnn_ops
from tests.cases import sdpa
from tests.cases.rotary import CASES, B, RotaryCase, S, draw, turned
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_NAME = {case.name: case for case in CASES}


def roots_of(t: dict[str, Tensor | None]) -> list[Tensor]:
    return [x for x in (t["input"], t["key"]) if x is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["BSHD", "sliced"])
@by_name
def test_results_and_gradients(case, layout, device, poisoned):
    for dtype, angles in (
        *((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)),
        *((torch.float16, torch.float16), (torch.float32, torch.float32)),
    ):
        torch.manual_seed(case.size)
        t = draw(case, dtype, angles, device, layout)
        roots = roots_of(t)
        outs = case.call(t)
        assert all(out.transpose(1, 2).is_contiguous() for out in outs)
        grads = [torch.randn_like(out) for out in outs]
        found = (*outs, *torch.autograd.grad(outs, roots, grads))
        results = []
        for wide in (torch.float64, dtype):
            leaves = [x.detach().to(wide).requires_grad_() for x in roots]
            cos, sin = (t[name].to(wide) for name in ("cos", "sin"))
            made = [turned(case, x, cos, sin, t["positions"]) for x in leaves]
            results.append(
                (*made, *torch.autograd.grad(made, leaves, [grad.to(wide) for grad in grads]))
            )
        for mine, exact, rough in zip(found, *results, strict=True):
            sdpa.check(mine, exact, rough, f"{dtype} {angles}")


@pytest.mark.parametrize("device", DEVICES)
@by_name
def test_what_does_not_turn_is_copied(case, device):
    """Bit by bit, whatever the numbers are."""
    t = draw(case, torch.float32, torch.float32, device)
    for x in roots_of(t):
        x.data[..., case.turned :] = torch.tensor([float("nan"), float("inf")], device=device)[0]
    for x, out in zip(roots_of(t), case.call(t), strict=True):
        assert torch.equal(
            out[..., case.turned :].contiguous().view(torch.int32),
            x[..., case.turned :].contiguous().view(torch.int32),
        )
        assert not out[..., : case.turned].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["both", "part_neighbours", "everything"])
def test_opcheck_and_derivatives_of_any_order(name, device):
    case = BY_NAME[name]
    t = draw(case, torch.float32, torch.float32, device)
    layout = [int(case.interleaved), case.rotary_dim or 0, *(case.sections or ())]
    for is_backward in (False, True):
        arguments = (*t.values(), layout, is_backward)
        torch.library.opcheck(_ops._rotary.default, arguments)
    roots = roots_of(t)

    def second(call) -> tuple[Tensor, ...]:
        outs = call()
        powers = torch.stack([out.pow(3).sum() for out in outs])
        grads = torch.autograd.grad(powers.sum(), roots, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), roots)

    cos, sin, positions = t["cos"], t["sin"], t["positions"]
    found = second(lambda: case.call(t))
    expected = second(lambda: [turned(case, x, cos, sin, positions) for x in roots])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", ["input", "key", None])
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_gradients_of_some(used, frozen, device):
    """Where an input needs no gradient, and where nothing was computed of a result."""
    case = BY_NAME["both"]
    t = draw(case, torch.float32, torch.float32, device)
    if frozen is not None:
        t[frozen].requires_grad_(False)
    roots = roots_of(t)
    outs = case.call(t)
    leaves = [x for x in roots if x.requires_grad]
    torch.manual_seed(3)
    weights = [torch.randn_like(out) for out in outs]
    found = torch.autograd.grad(
        sum((outs[i] * weights[i]).sum() for i in used), leaves, allow_unused=True
    )
    made = [turned(case, x, t["cos"], t["sin"], None) for x in roots]
    total = sum((made[i] * weights[i]).sum() for i in used)
    if not total.requires_grad:
        assert found == (None,)
        return
    expected = torch.autograd.grad(total, leaves, allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
@by_name
def test_compiled_with_dynamic_sizes(case, device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda t: [out * 2 for out in case.call(t)],
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    t = draw(case, torch.float32, torch.float32, device)
    for _ in range(2):
        found, expected = compiled(t), case.call(t)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs * 2)
        for mine, theirs in zip(
            torch.autograd.grad(sum(x.sum() for x in found), roots_of(t)),
            torch.autograd.grad(sum(x.sum() for x in expected), roots_of(t)),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs * 2)
        t = {name: None if x is None else x[..., :S, :] for name, x in t.items() if x is not None}
        t = draw(case, torch.float32, torch.float32, device, "sliced")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(0, 3, 7), (2, 0, 7), (2, 3, 0)], ids=str)
def test_nothing(sizes, device):
    batch, heads, tokens = sizes
    query = torch.ones(batch, heads, tokens, 16, device=device, requires_grad=True)
    key = torch.ones(batch, 2, tokens, 16, device=device)
    table = torch.ones(4, 8, device=device)
    positions = torch.ones(1, tokens, dtype=torch.int64, device=device)
    outs = cudnn_ops.rotary_embedding_qk(
        query, key, table, table, rotary_dim=16, positions=positions, interleaved=True
    )
    assert [out.shape for out in outs] == [query.shape, key.shape]
    (grad,) = torch.autograd.grad(outs[0].sum(), query)
    assert grad.shape == query.shape
    torch.testing.assert_close(outs[1], torch.ones_like(key) * torch.tensor([0.0, 2.0] * 8).to(key))


def out_of_range(device: str, positions: list[int]) -> Tensor:
    x, table = torch.ones(1, 1, len(positions), 4, device=device), torch.eye(4, device=device)
    return cudnn_ops.rotary_embedding(
        x, table, torch.zeros_like(table), positions=torch.tensor([positions], device=device)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positions", [[0, 4], [-1, 2], [2**40, 0]], ids=str)
def test_positions_out_of_range(positions, device, monkeypatch):
    monkeypatch.setenv("CUDNN_OPS_CHECK", "1")
    with pytest.raises(ValueError, match=r"positions must be rows of cos and sin, 0 to 3; got"):
        out_of_range(device, positions)


@pytest.mark.gpu
def test_positions_that_are_not_checked(monkeypatch):
    monkeypatch.delenv("CUDNN_OPS_CHECK", raising=False)
    out = out_of_range("cuda", [-(2**40), -1, 1, 4, 2**40])
    expected = torch.eye(4, device="cuda")[[0, 0, 1, 3, 3]]
    torch.testing.assert_close(out[0, 0], expected)


def arguments(**changes: object) -> dict[str, object]:
    angles = torch.ones(B, S, 8)
    return {
        "query": torch.ones(B, 3, S, 8),
        "key": torch.ones(B, 1, S, 8),
        "cos": angles,
        "sin": angles,
        **changes,
    }


BOTH = {"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)}
OF_AXES = {"cos": torch.ones(2, 1, S, 8), "sin": torch.ones(2, 1, S, 8)}
NO_POSITIONS = torch.zeros(1, S, dtype=torch.int64)
WRONG = [
    ({"query": torch.ones(B, 3, S)}, ValueError, r"query must be \[B, H, S, D\]"),
    ({"key": None}, TypeError, "key must be a tensor, got None"),
    ({"key": torch.ones(B, 1, S, 8).half()}, TypeError, "key must be of the query's dtype"),
    ({"key": torch.ones(B, 1, S + 1, 8)}, ValueError, r"key must be \[B, heads, S, D\]"),
    ({"key": torch.ones(1, 1, S, 8)}, ValueError, r"key must be \[B, heads, S, D\]"),
    ({"key": torch.ones(B, 1, S, 6)}, ValueError, r"key must be \[B, heads, S, D\]"),
    ({"cos": torch.ones(B, S, 4), "sin": torch.ones(B, S, 4)}, ValueError, "rotary_dim allows"),
    ({"rotary_dim": 0}, ValueError, "rotary_dim must be even, from 2 to the size of a head; got 0"),
    ({"rotary_dim": 3}, ValueError, "rotary_dim must be even, from 2 to the size of a head, 8"),
    ({"rotary_dim": 10}, ValueError, "rotary_dim must be even, from 2 to the size of a head, 8"),
    ({"rotary_dim": 6}, ValueError, r"\[B or 1, S, R or R / 2\] .* R = rotary_dim = 6; got"),
    ({"rotary_dim": 4.0}, TypeError, "rotary_dim must be a whole number or None, got 4.0"),
    ({"interleaved": "yes"}, TypeError, "interleaved must be True or False, got 'yes'"),
    ({"sections": ()}, ValueError, r"sections must be 1 to 4 numbers of pairs, got \[\]"),
    ({"sections": (1, 2)}, ValueError, "whose sum is half of the 8 numbers that turn"),
    ({"sections": (5, -1)}, ValueError, "sections must be 1 to 4 numbers of pairs"),
    ({"sections": (1, 1, 1, 1, 0)}, ValueError, "sections must be 1 to 4 numbers of pairs"),
    ({"sections": (2, 2)}, ValueError, r"\[sections, B or 1, S, D\] .* sections \[2, 2\]; got"),
    ({"sections": (1, 2, 1), **OF_AXES}, ValueError, r"\[sections, B or 1, S, D\]"),
    ({"sections": 4}, TypeError, r"sections must be a sequence of integers"),
    ({"positions": NO_POSITIONS}, ValueError, r"cos and sin must be \[N, D\]"),
    ({"positions": NO_POSITIONS.float(), **BOTH}, TypeError, "positions must be int32 or int64"),
    ({"positions": NO_POSITIONS[0], **BOTH}, ValueError, r"positions must be \[B or 1, S\]"),
    ({"positions": NO_POSITIONS[:, 1:], **BOTH}, ValueError, r"positions must be \[B or 1, S\]"),
    (
        {"positions": NO_POSITIONS, "sections": (2, 2), **BOTH},
        ValueError,
        r"positions must be \[sections, B or 1, S\]",
    ),
    (
        {"positions": NO_POSITIONS, "cos": torch.ones(0, 8), "sin": torch.ones(0, 8)},
        ValueError,
        r"cos and sin must be \[N, D\]",
    ),
    ({"positions": [0] * S}, TypeError, "positions must be a tensor or None, got list"),
    ({"sin": torch.ones(B, S, 8, requires_grad=True)}, NotImplementedError, "no gradient"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("change", "error", "match"), WRONG, ids=str)
def test_bad_input(change, error, match, device):
    given = arguments(**change)
    placed = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    with pytest.raises(error, match=rf"^cudnn_ops\.rotary_embedding_qk: .*{match}"):
        cudnn_ops.rotary_embedding_qk(**placed)


def test_a_case_that_the_reference_would_notice():
    """Each option of a case changes what it computes."""
    t = draw(BY_NAME["everything"], torch.float64, torch.float64, "cpu")
    case = BY_NAME["everything"]
    results = [
        turned(other, t["input"], t["cos"], t["sin"], t["positions"])
        for other in (
            case,
            RotaryCase("", 2, 64, False, 32, True, (4, 8, 4), 30, 2),
            RotaryCase("", 2, 64, True, 32, True, (8, 4, 4), 30, 2),
        )
    ]
    assert not torch.allclose(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
