"""``cudnn_ops.fallback``: what torch's operators compute where ours refuse."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn_ops
from cudnn_ops.ops import fallback
from tests.test_decomposition import CASES, Call

REASON = "not on this machine"
#: Cases of operators with gradients of all of their tensors, or of the first three.
TRAINED = ("attention", "packed", "layers")


class Refusing(TorchDispatchMode):
    """A machine that supports nothing: every kernel of ours raises."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_real = not any(
            isinstance(arg, torch._subclasses.FakeTensor)
            for arg in torch.utils._pytree.tree_leaves((args, kwargs))
        )
        if func.namespace == "cudnn_ops" and not func._schema.name.endswith("_check") and is_real:
            raise NotImplementedError(REASON)
        return func(*args, **(kwargs or {}))


def rotate(angles: Tensor) -> Tensor:
    """A call that our operator refuses where the angles need a gradient."""
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    return cudnn_ops.rotary_embedding(x, angles.cos(), angles.sin())


@pytest.mark.parametrize("name", CASES)
def test_every_operator(name):
    """Results as those of the operators, and gradients where these have any."""
    function, args, _, others = CASES[name]
    for given in (args, others):
        is_trained = name in TRAINED
        leaves = [t.clone().requires_grad_(is_trained and t.is_floating_point()) for t in given]
        expected = Call(function)(*leaves)
        with cudnn_ops.fallback("torch") as taken, Refusing():
            found = Call(function)(*leaves)
        assert taken.calls == sum(row.calls for row in taken.rows) > 0
        assert {row.reason for row in taken.rows} == {REASON}
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert one.stride() == other.stride()
            assert one.requires_grad == other.requires_grad
            if other.requires_grad:
                grads = [
                    torch.autograd.grad(
                        out.sin().sum(), leaves[:3], retain_graph=True, materialize_grads=True
                    )
                    for out in (one, other)
                ]
                for mine, right in zip(*grads, strict=True):
                    torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)


def test_only_inside_and_only_once_logged(caplog):
    angles = torch.randn(1, 5, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="cos and sin have no gradient"):
        rotate(angles)
    with caplog.at_level(logging.WARNING), cudnn_ops.fallback("torch") as taken:
        assert str(taken) == "no call ran by torch's operators"
        rotate(angles.detach())
        assert taken.calls == 0  # it is supported
        out = rotate(angles)
        for _ in range(2):
            rotate(angles)
    (row,) = taken.rows
    assert row.op == "cudnn_ops.rotary_embedding"
    assert row.shapes == "float32 [1, 2, 5, 8], float32 [1, 5, 8], float32 [1, 5, 8]"
    assert row.calls == taken.calls == 3
    assert str(taken).startswith(f"3 x {row.op} of {row.shapes} ran by torch's operators: cudnn_")
    (record,) = caplog.records
    assert record.name == "cudnn_ops.fallback"
    assert record.getMessage().startswith(f"{row.op} of {row.shapes} runs by torch's operators: ")
    torch.testing.assert_close(out, rotate(angles.detach()))
    (grad,) = torch.autograd.grad(out.sum(), angles)
    assert grad.abs().max() > 0
    with pytest.raises(NotImplementedError):
        rotate(angles)


def test_other_shapes_and_values_are_other_graphs():
    """Nothing of the first call is in the graph of the next one."""
    draw = torch.Generator().manual_seed(0)
    with cudnn_ops.fallback("torch") as taken, Refusing():
        for eps in (1e-5, 1e-1):
            for rows in (3, 4, 3):
                x = torch.randn(rows, 8, generator=draw)
                expected = torch.nn.functional.rms_norm(x, (8,), None, eps)
                torch.testing.assert_close(cudnn_ops.rms_norm(x, (8,), None, eps), expected)
    assert [row.calls for row in taken.rows] == [4, 2]


def test_what_is_wrong_still_raises():
    x = torch.randn(2, 4, 8, 16)
    with cudnn_ops.fallback("torch") as taken:
        with pytest.raises(ValueError, match="key"):
            cudnn_ops.scaled_dot_product_attention(x, x[..., :8], x)
        with pytest.raises(TypeError, match="key"):
            cudnn_ops.scaled_dot_product_attention(x, x.double(), x)
        with pytest.raises(TypeError):
            cudnn_ops.rms_norm(x.long(), (16,))
        with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
            cudnn_ops.scaled_dot_product_attention(x, "key", x)
    assert taken.calls == 0


def test_what_has_no_decomposition_still_raises():
    x, statistics = torch.randn(4, 8, 3, 3), torch.ones(8)
    q, slots = torch.randn(1, 2, 4, 8), torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(2, 4, 2, 8)
    with cudnn_ops.fallback("torch") as taken, Refusing():
        for call in (
            lambda: cudnn_ops.batch_norm(x, statistics, statistics, training=True),
            lambda: cudnn_ops.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
            lambda: cudnn_ops.paged_kv_append_(cache, cache, q[0, :, :1], q[0, :, :1], slots),
        ):
            with pytest.raises(NotImplementedError, match=REASON):
                call()
    assert taken.calls == 0
    assert torch.equal(statistics, torch.ones(8))


def test_autocast_gives_the_operators_dtype():
    q, w = torch.randn(2, 4, 8, 16), torch.randn(16, 16)
    for call in (
        lambda: cudnn_ops.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda: cudnn_ops.scaled_dot_product_attention(q, q, q, q[:1, :1, :, :8]),
        lambda: cudnn_ops.linear(q, w, activation="silu"),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            expected = call()
            with cudnn_ops.fallback("torch") as taken, Refusing():
                found = call()
        assert taken.calls == 1
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_dtype_that_the_operator_lacks():
    """It is refused before there are results, with fake tensors too."""

    class Lacking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "cudnn_ops" and get_proxy_mode() is None:
                raise TypeError("query has dtype Float")
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 5, 8)
    expected = cudnn_ops.scaled_dot_product_attention(q, q, q, softcap=2.0)
    with cudnn_ops.fallback("torch") as taken, Lacking():
        found = cudnn_ops.scaled_dot_product_attention(q, q, q, softcap=2.0)
    assert [row.reason for row in taken.rows] == ["query has dtype Float"]
    torch.testing.assert_close(found, expected)


def test_kernels_keep_what_their_backwards_need():
    """A trace without gradients asks torch's attention for no log-sum-exp."""
    for kernel in fallback._WITH_SUMS:
        assert kernel._schema.arguments[4].name == "compute_log_sumexp"
        graph = torch.fx.Graph()
        inputs = [graph.placeholder(name) for name in "qkv"]
        graph.output(graph.call_function(kernel, (*inputs, None, False)))
        module = torch.fx.GraphModule({}, graph)
        fallback._keep_sums(module)
        (node,) = module.graph.find_nodes(op="call_function", target=kernel)
        assert node.args[4] is True


@pytest.mark.parametrize(
    "transform", [torch.vmap, lambda call: torch.func.grad(lambda x: call(x).sum())]
)
def test_transforms_are_left_alone(transform):
    """And leave no graph behind for calls of the same shapes outside of them."""
    angles = torch.randn(1, 5, 8, requires_grad=True)
    x = torch.randn(3, 1, 2, 5, 8)

    def call(x: Tensor) -> Tensor:
        return cudnn_ops.rotary_embedding(x, angles.cos(), angles.sin())

    with cudnn_ops.fallback("torch") as taken:
        with pytest.raises(NotImplementedError, match="have no gradient"):
            transform(call)(x if transform is torch.vmap else x[0])
        assert taken.calls == 0
        out = call(x[0])
        assert taken.calls == 1
    expected = cudnn_ops.rotary_embedding(x[0], angles.detach().cos(), angles.detach().sin())
    torch.testing.assert_close(out, expected)


def test_subclasses_are_left_alone():
    class Own(Tensor):
        pass

    x = torch.randn(3, 8).as_subclass(Own)
    refused = pytest.raises(NotImplementedError, match=REASON)
    with cudnn_ops.fallback("torch") as taken, Refusing(), refused:
        torch.ops.cudnn_ops.rms_norm.default(x, [8])
    assert taken.calls == 0


def test_no_tensor_is_kept():
    x = torch.randn(3, 8)
    with cudnn_ops.fallback("torch"), Refusing():
        cudnn_ops.rms_norm(x, (8,), eps=0.123)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_contexts_are_of_a_thread_and_the_outermost_counts():
    angles = torch.randn(1, 5, 8, requires_grad=True)
    raised: list[Any] = []

    def other() -> None:
        with pytest.raises(NotImplementedError) as error:
            rotate(angles)
        raised.append(error)

    with cudnn_ops.fallback("torch") as outer:
        with cudnn_ops.fallback("torch") as inner:
            rotate(angles)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        rotate(angles)
    assert (inner.calls, outer.calls, len(raised)) == (0, 2, 1)


def test_a_compiled_function_runs_as_it_does():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def norm(x: Tensor) -> Tensor:
        return cudnn_ops.rms_norm(x, (8,)) * 2

    x = torch.randn(3, 8)
    with cudnn_ops.fallback("torch") as taken:
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,)) * 2)
    assert taken.calls == 0


def test_to_what():
    refused = pytest.raises(ValueError, match=r"to must be 'torch', got 'flash'")
    with refused, cudnn_ops.fallback("flash"):
        pass


@pytest.mark.gpu
def test_float32_attention_on_a_gpu():
    """For which cuDNN has no kernel."""
    q, k, v = (torch.randn(2, 4, 9, 40, device="cuda", requires_grad=True) for _ in range(3))
    with pytest.raises(TypeError):
        cudnn_ops.scaled_dot_product_attention(q, k, v)
    with cudnn_ops.fallback("torch") as taken:
        found = cudnn_ops.scaled_dot_product_attention(q, k, v, is_causal=True, softcap=3.0)
        model = cudnn_ops.nn.TransformerBlock(64, 4, 96, device="cuda")
        model(torch.randn(2, 9, 64, device="cuda")).sum().backward()
    assert taken.calls == 2
    doubles = [t.detach().double().cpu().requires_grad_() for t in (q, k, v)]
    right = cudnn_ops.scaled_dot_product_attention(*doubles, is_causal=True, softcap=3.0)
    torch.testing.assert_close(found.cpu().double(), right, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(found.sin().sum(), (q, k, v))
    expected = torch.autograd.grad(right.sin().sum(), doubles)
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine.cpu().double(), other, rtol=1e-3, atol=1e-4)
