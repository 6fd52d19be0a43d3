"""Whatever shapes and memory torch's F.scaled_dot_product_attention takes, ours takes by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from tests.cases import sdpa_shapes as cases
from tests.cases.sdpa import check, lse_dtype
from tests.cases.sdpa_shapes import CALLS, OPINFO, SOME, Call, of
from tests.conftest import DEVICES

_ops = torch.ops.cudnn_ops
_with_lse = cudnn_ops.scaled_dot_product_attention_with_lse


def _dtypes(device: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [*OPINFO, *CALLS], ids=str)
def test_results_and_gradients(call, device, poisoned):
    for dtype in _dtypes(device):
        tensors = cases.make(call, dtype, device)
        actual = cases.differentiate(call, tensors, _with_lse)
        wide = cases.in_precision(tensors, torch.float64)
        exact = cases.differentiate(call, wide, cases.attention)
        rough = cases.differentiate(call, tensors, cases.attention)
        in_full = cases.in_precision(tensors, lse_dtype(dtype))
        rough["lse"] = cases.differentiate(call, in_full, cases.attention)["lse"]
        assert actual.keys() == exact.keys()
        for name, expected in exact.items():
            check(actual[name], expected, rough[name], f"{name} in {dtype}")
        alone = cudnn_ops.scaled_dot_product_attention(**tensors, **call.kwargs())
        check(alone, exact["out"], rough["out"], f"out alone in {dtype}")


@pytest.mark.parametrize("call", [*OPINFO, *CALLS], ids=str)
def test_the_reference_is_what_torch_computes(call):
    tensors = cases.make(call, torch.float64, "cpu")
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(**tensors, **call.kwargs())
    out, lse = cases.attention(**tensors, **call.kwargs())
    assert lse.shape == out.shape[:-1]
    if call.query[-1] == 0:  # torch divides by its root
        expected = out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", [call for call in OPINFO if call.mask is None], ids=str)
def test_dropout(call, device):
    """With one-hot values, one set for all heads, the output is the weights that are left."""
    dtype = _dtypes(device)[0]
    tensors = cases.make(call, dtype, device)
    seed = torch.tensor([5, 0], device=device)
    options: dict[str, Any] = {**call.kwargs(), "dropout_p": 0.5, "rng_state": seed}
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    out = cudnn_ops.scaled_dot_product_attention(query, key, value, **options)
    one_hot = torch.eye(key.shape[-2], dtype=dtype, device=device)
    weights = cudnn_ops.scaled_dot_product_attention(query, key, one_hot, **options).double()
    exact, _ = cases.attention(
        query.double(), key.double(), one_hot.double(), is_causal=call.is_causal
    )
    kept = weights != 0
    assert 0.25 < kept.double().sum() / (exact != 0).double().sum() < 0.75
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if device == "cuda" else {}
    torch.testing.assert_close(
        weights, 2 * exact.masked_fill(~kept, 0.0), **tolerance, check_dtype=False
    )
    torch.testing.assert_close(
        out.double(), weights @ value.double(), **(tolerance or {"rtol": 1e-5, "atol": 1e-5})
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", SOME, ids=str)
def test_inference_mode_and_fake_tensors(call, device):
    """Autograd is left out there; the results lie in memory as they do elsewhere."""
    tensors = cases.make(call, _dtypes(device)[0], device)
    expected = _with_lse(**tensors, **call.kwargs())
    with torch.inference_mode():
        inside = _with_lse(**{n: t.clone() for n, t in tensors.items()}, **call.kwargs())
        alone = cudnn_ops.scaled_dot_product_attention(**tensors, **call.kwargs())
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in tensors.items()}
        fake = _with_lse(**fakes, **call.kwargs())
        with torch.inference_mode():
            fake_inside = _with_lse(**fakes, **call.kwargs())
    for index, name in enumerate(("out", "lse")):
        torch.testing.assert_close(inside[index], expected[index])
        for other in (inside, fake, fake_inside):
            assert other[index].shape == expected[index].shape, name
            assert other[index].dtype == expected[index].dtype, name
        for other in (fake, fake_inside):
            assert other[index].stride() == expected[index].stride(), name
    torch.testing.assert_close(alone, expected[0])
    assert inside[0].is_inference()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("call", SOME, ids=str)
def test_whole_graphs(call, dynamic, device):
    torch._dynamo.reset()

    def run(query: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        out, lse = _with_lse(query * 1.5, **others)
        return out.relu(), lse.sin()

    counter = CompileCounterWithBackend("inductor" if dynamic else "aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend=counter)
    tensors = cases.make(call, _dtypes(device)[0], device)
    expected = cases.differentiate(call, tensors, run)
    actual = cases.differentiate(call, tensors, compiled)
    for name, result in expected.items():
        torch.testing.assert_close(actual[name], result, rtol=4e-2, atol=4e-2)
    assert actual["out"].stride() == expected["out"].stride()
    if dynamic:  # another length, no other graph
        graphs = counter.frame_count

        def longer(shape: tuple[int, ...] | None) -> Any:
            return shape and tuple({17: 33, 24: 40}.get(size, size) for size in shape)

        shapes = {n: longer(getattr(call, n)) for n in ("query", "key", "value", "mask")}
        other = Call(**vars(call) | shapes)
        tensors = cases.make(other, _dtypes(device)[0], device)
        expected = cases.differentiate(other, tensors, run)
        actual = cases.differentiate(other, tensors, compiled)
        for name, result in expected.items():
            torch.testing.assert_close(actual[name], result, rtol=4e-2, atol=4e-2)
        assert counter.frame_count == graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", SOME, ids=str)
def test_opcheck(call, device):
    tolerance = 2e-2 if device == "cuda" else None
    tensors = cases.make(call, _dtypes(device)[0], device)
    inputs = tuple(t.requires_grad_(t.is_floating_point()) for t in tensors.values())
    for op in (_ops.sdpa.default, _ops.sdpa_with_lse.default):
        torch.library.opcheck(op, inputs, call.kwargs(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_the_batch_of_more_dimensions_is_their_product(device):
    dtype = _dtypes(device)[0]
    tensors = cases.make(of((2, 3, 4, 17, 64), (2, 3, 4, 24, 64)), dtype, device)
    lengths = torch.tensor([24, 0, 3, 17, 24, 1], dtype=torch.int32, device=device)
    options: dict[str, Any] = {
        "seq_lens_kv": lengths,
        "sinks": torch.randn(4, device=device),
        "window_size": (9, 2),
    }
    out, lse = _with_lse(**tensors, **options)
    flat, flat_lse = _with_lse(**{n: t.flatten(0, 1) for n, t in tensors.items()}, **options)
    torch.testing.assert_close(out, flat.unflatten(0, (2, 3)))
    torch.testing.assert_close(lse, flat_lse.unflatten(0, (2, 3)))


@pytest.mark.parametrize("device", DEVICES)
def test_three_dimensions_are_heads(device):
    dtype = _dtypes(device)[0]
    tensors = cases.make(of((4, 17, 64), (4, 17, 64)), dtype, device)
    options = {
        "alibi_slopes": torch.rand(4, device=device),
        "sinks": torch.randn(4, device=device),
        "is_causal": True,
    }
    out = cudnn_ops.scaled_dot_product_attention(**tensors, **options)
    four = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    torch.testing.assert_close(
        out, cudnn_ops.scaled_dot_product_attention(**four, **options).squeeze(0)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads_kv", [0, 3])
def test_no_heads(heads_kv, device):
    """An empty result, and gradients that are zero."""
    call = of((2, 0, 17, 64), (2, heads_kv, 24, 64), enable_gqa=True)
    tensors = cases.make(call, _dtypes(device)[0], device)
    actual = cases.differentiate(call, tensors, _with_lse)
    assert actual["out"].shape == (2, 0, 17, 64)
    assert actual["lse"].shape == (2, 0, 17)
    for name, tensor in tensors.items():
        assert actual[f"grad_{name}"].shape == tensor.shape
        assert not actual[f"grad_{name}"].any()
    if heads_kv == 0:
        leaves = [tensor.requires_grad_() for tensor in tensors.values()]
        out = cudnn_ops.scaled_dot_product_attention(*leaves)
        out.sum().backward()
        assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [False, True])
def test_flops_of_what_broadcasts(inference, device):
    tensors = cases.make(of((17, 64), (2, 4, 24, 64)), _dtypes(device)[0], device)
    with torch.inference_mode(inference), FlopCounterMode(display=False) as counter:
        cudnn_ops.scaled_dot_product_attention(**tensors)
    assert counter.get_total_flops() == 2 * 4 * 17 * 24 * 2 * (64 + 64)


def test_the_copies_are_part_of_the_plan_that_is_asked_for():
    """What explains or warms up a call sees the tensors that its kernel does."""

    def words(size: int, *batch: int) -> list[int]:
        query = torch.empty(*batch, 40, size, dtype=torch.bfloat16, device="meta")
        return _ops._sdpa_plan_key(query, query, query)[0]

    assert words(20, 2, 4) == words(24, 2, 4)
    assert words(64, 4) == words(64, 1, 4)
    assert words(64, 2, 3, 4) == words(64, 6, 4)
