"""Attention over a split sequence under what torch does around operators, in two processes.

One start of the processes serves many checks; the first that fails ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import cudnn_ops
from cudnn_ops.distributed import (
    all_to_all_attention,
    passing,
    ring_attention,
    ring_attention_with_lse,
    ring_backward,
    ring_steps,
    zigzag_shard,
    zigzag_unshard,
)
from cudnn_ops.distributed.blocks import Plan
from tests.distributed.processes import device, run_in_processes

Attend = Callable[..., Tensor]


def world() -> Any:
    return distributed.group.WORLD


def inputs(
    length: int = 12, dtype: torch.dtype = torch.bfloat16, heads: Sequence[int] = (4, 2, 2)
) -> list[Tensor]:
    """This rank's query, key and value of a sequence; other ones on each rank."""
    generator = torch.Generator().manual_seed(distributed.get_rank())
    return [
        torch.randn(2, some, length, 16, generator=generator).to(device().type, dtype)
        for some in heads
    ]


def leaves(**kwargs: Any) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in inputs(**kwargs)]


def causal(attend: Attend) -> Attend:
    return partial(attend, mesh=world(), is_causal=True, enable_gqa=True, order="zigzag")


def gradients(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    out.float().square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """To the bit; on a GPU another plan may run, and cuDNN's sums have no fixed order."""
    allowed = 0 if device().type == "cpu" else 2e-2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=allowed, atol=allowed)


def check_compile() -> None:
    for attend in (ring_attention, all_to_all_attention):
        function = causal(attend)

        def block(q, k, v, function=function):
            return function(q.sin(), k, v).cos()

        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        assert_equal(gradients(compiled, leaves()), gradients(block, leaves()))
        with torch.no_grad():
            assert_equal([compiled(*inputs())], [block(*inputs())])


def check_compile_with_dynamic_lengths() -> None:
    function = causal(ring_attention)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (8, 12, 20):
        tensors = leaves(length=length)
        assert_equal(gradients(compiled, tensors), gradients(function, tensors))


def check_compile_over_a_mesh() -> None:
    mesh = init_device_mesh(device().type, (1, 2), mesh_dim_names=("dp", "cp"))

    def both(q, k, v):
        named = ring_attention(q, k, v, mesh, mesh_dim="cp", enable_gqa=True)
        return named + ring_attention(q, k, v, mesh, mesh_dim=1, enable_gqa=True)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert_equal(gradients(compiled, leaves()), gradients(both, leaves()))
    sliced = partial(ring_attention, mesh=mesh["cp"], enable_gqa=True)
    alone = partial(ring_attention, mesh=mesh, mesh_dim="dp", enable_gqa=True)
    assert_equal([2 * sliced(*inputs())], [both(*inputs())])
    q, k, v = inputs()
    expected = cudnn_ops.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_equal([alone(*inputs())], [expected])


def check_opcheck() -> None:
    options = (world().group_name, "zigzag", True, None, (-1, -1), False, 0.0, None)
    tensors = leaves(dtype=torch.float32 if device().type == "cpu" else torch.bfloat16)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(0))
    sinks = sinks.to(device().type).requires_grad_()
    torch.library.opcheck(
        torch.ops.cudnn_ops._ring_attention.default, (*tensors, sinks, None, *options)
    )
    detached = [tensor.detach() for tensor in tensors]
    out, lse = torch.ops.cudnn_ops._ring_attention(*detached, sinks.detach(), None, *options)
    torch.library.opcheck(
        torch.ops.cudnn_ops._ring_attention_backward.default,
        (out, lse, *detached, out, lse, sinks.detach(), None, [True, True, True], *options),
    )


def check_checkpoint() -> None:
    for attend in (ring_attention, all_to_all_attention):
        function = causal(attend)
        expected = gradients(function, leaves())
        for reentrant in (False, True):
            saved = partial(checkpoint, function, use_reentrant=reentrant)
            assert_equal(gradients(saved, leaves()), expected)


def check_selective_checkpoint() -> None:
    function = causal(ring_attention)
    context = partial(create_selective_checkpoint_contexts, cudnn_ops.checkpoint_ops())
    saved = partial(checkpoint, function, use_reentrant=False, context_fn=context)
    with patch.object(ring_steps, "forward", wraps=ring_steps.forward) as spy:
        found = gradients(saved, leaves())
        assert spy.call_count == 1
    assert_equal(found, gradients(function, leaves()))


def check_flops() -> None:
    tensors = leaves()  # 24 tokens on two ranks
    starts = torch.tensor([0, 5, 24])
    with FlopCounterMode(display=False) as counter:
        causal(ring_attention)(*tensors).float().sum().backward()
    assert counter.get_total_flops() == (2 * 2 + 2 * 5) * 16 * (2 * 4 * 24 * 24) // 2
    packed = [tensor[0].transpose(0, 1) for tensor in inputs()]
    with FlopCounterMode(display=False) as counter:
        causal(ring_attention)(*packed, cu_seqlens=starts)
    assert counter.get_total_flops() == 2 * 2 * 16 * 4 * (5 * 5 + 19 * 19) // 2


def check_saved_tensor_hooks() -> None:
    function = causal(ring_attention)
    expected = gradients(function, leaves())
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        if tensor.dim() != 4:
            return tensor
        # With a last stride that the kernels do not take.
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)

    def with_hooks(*tensors: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return function(*tensors)

    assert_equal(gradients(with_hooks, leaves()), expected)
    # Local tensors alone, and the log-sum-exp.
    assert sorted(packed) == sorted(
        [(2, 4, 12, 16), (2, 2, 12, 16), (2, 2, 12, 16), (2, 4, 12, 16), (2, 4, 12)]
    )


def check_changes_in_place() -> None:
    tensors = leaves()
    q = tensors[0] * 1
    out = causal(ring_attention)(q, *tensors[1:])
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def check_frozen_inputs() -> None:
    function = causal(ring_attention)
    whole = leaves()
    expected = gradients(function, whole)[1:]
    names = ("q", "k", "v")
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        tensors = inputs()
        for index in wanted:
            tensors[index].requires_grad_()
        start = ring_backward.start_transfer
        with patch.object(ring_backward, "start_transfer", wraps=start) as spy:
            out = function(*tensors)
            found = torch.autograd.grad(
                out.float().square().sum(), [tensors[index] for index in wanted]
            )
            # Without a gradient of keys or values nothing follows them.
            assert spy.called == (wanted != (0,)), names
        assert_equal(list(found), [expected[index] for index in wanted])


def check_a_backward_in_groups_of_heads() -> None:
    """As where one call's workspace would be too large."""
    starts = torch.tensor([0, 5, 24])
    packed = partial(ring_attention, mesh=world(), is_causal=True, cu_seqlens=starts)

    def of_one(*tensors: Tensor) -> Tensor:
        return packed(*(tensor[0].transpose(0, 1) for tensor in tensors))

    def counted(function: Attend) -> tuple[list[Tensor], int]:
        with patch.object(ring_backward, "_one_gradient", wraps=ring_backward._one_gradient) as spy:
            return gradients(function, leaves(heads=(6, 3, 3))), spy.call_count

    for function in (causal(ring_attention), of_one):
        expected, calls = counted(function)
        with patch.object(ring_backward, "_BACKWARD_NUMBERS", 1):  # a key head a call
            found, more = counted(function)
        assert more == 3 * calls
        assert_equal(found, expected)
        # Two of the three at once where the batch is of one, else one.
        with patch.object(ring_backward, "_BACKWARD_NUMBERS", 2 * 2 * 12 * 16):
            assert_equal(counted(function)[0], expected)


def check_what_is_kept_in_16_bits() -> None:
    """What is of one part, or of two at once: the result is what sums in float32 are rounded to."""

    def with_lse(*tensors: Tensor, order: str) -> Tensor:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "order": order}
        q, k, v = tensors
        out, lse = ring_attention_with_lse(q, k, v, world(), **options)
        return out + lse.unsqueeze(-1)

    sum_of = ring_backward._Sums._sum_of

    def in_float32(sums: Any, parts: Any, _: torch.dtype) -> list[Tensor]:
        return sum_of(sums, parts, torch.float32)

    attend = causal(ring_attention)
    functions = [partial(attend, order=order) for order in ("contiguous", "zigzag")]
    if distributed.get_world_size() != 2:
        # What a single rank adds, by the output and by the log-sum-exp, travels as one part.
        functions.append(partial(with_lse, order="zigzag"))
    for function in functions:
        found = gradients(function, leaves())
        with (
            patch.object(Plan, "parts_of_queries", lambda *_: 99),
            patch.object(ring_backward._Sums, "_dtype", lambda *_: torch.float32),
            patch.object(ring_backward._Sums, "_sum_of", in_float32),
        ):
            wide = gradients(function, leaves())
        assert_equal(found, wide)


def check_sinks_alone() -> None:
    sinks = torch.zeros(4, device=device().type, requires_grad=True)
    whole = leaves()
    out = causal(ring_attention)(*whole, sinks=sinks)
    (expected, *_) = torch.autograd.grad(out.float().sum(), [sinks, *whole])
    with patch.object(ring_backward, "backward", side_effect=AssertionError("the ring ran")):
        out = causal(ring_attention)(*inputs(), sinks=sinks)
        (found,) = torch.autograd.grad(out.float().sum(), [sinks])
    assert_equal([found], [expected])


def check_autocast() -> None:
    tensors = inputs(dtype=torch.float32)
    for attend in (ring_attention, all_to_all_attention):
        with torch.autocast(device().type, dtype=torch.bfloat16):
            out = causal(attend)(*tensors)
        expected = causal(attend)(*(tensor.bfloat16() for tensor in tensors))
        assert_equal([out], [expected])


def check_gradients_of_any_layout() -> None:
    tensors = leaves()
    out = causal(ring_attention)(*tensors)
    plain = torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    expanded = torch.ones((), dtype=out.dtype, device=out.device).expand(out.shape)
    assert_equal(list(torch.autograd.grad(out, tensors, expanded)), list(plain))


def check_second_derivative() -> None:
    tensors = leaves()
    out = causal(ring_attention)(*tensors)
    (grad,) = torch.autograd.grad(out.float().square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="ring_attention: double backward is not"):
        grad.sum().backward()


def check_that_passing_overlaps() -> None:
    """What the second step needs is under way while the first computes."""
    events: list[str] = []

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return tell

    start = told("start", passing.start_transfer)
    with (
        patch.object(ring_steps, "start_transfer", start),
        patch.object(ring_backward, "start_transfer", start),
        patch.object(passing.Transfer, "wait", told("wait", passing.Transfer.wait)),
        patch.object(ring_steps, "_attend", told("compute", ring_steps._attend)),
        patch.object(ring_backward, "_one_gradient", told("gradient", ring_backward._one_gradient)),
    ):
        tensors = leaves()
        out = causal(ring_attention)(*tensors)
        assert events == ["start", "compute", "wait", "start", "compute", "wait"]
        events.clear()
        out.sum().backward()
    # Keys, compute, sums; then keys are there, compute, the sums of the first step are.
    assert events == [
        *("start", "gradient", "start", "wait"),
        *("start", "gradient", "wait", "start", "wait"),
        "wait",
    ]


def check_that_a_window_passes_less() -> None:
    sent: list[int] = []
    start = ring_steps.start_transfer

    def count(op: str, group: Any, sends: Any, receives: Any) -> Any:
        sent.append(sum(len(message.tensors) for message in sends))
        return start(op, group, sends, receives)

    with patch.object(ring_steps, "start_transfer", count):
        q, k, v = inputs()
        ring_attention(q, k, v, world(), enable_gqa=True, is_causal=True)
    # The last rank's keys are seen by no other.
    assert sum(sent) == (2 if distributed.get_rank() == 0 else 0)


def check_an_error_in_a_step() -> None:
    """What is under way ends; the next call finds nothing of it."""
    function = causal(ring_attention)
    expected = gradients(function, leaves())
    for module, name in ((ring_steps, "_attend"), (ring_backward, "_one_gradient")):
        with (
            patch.object(module, name, side_effect=NotImplementedError("no engine")),
            pytest.raises(NotImplementedError, match="no engine"),
        ):
            gradients(function, leaves())
        assert_equal(gradients(function, leaves()), expected)


def check_zigzag() -> None:
    x = torch.arange(2 * 12 * 3.0, requires_grad=True)
    whole = x.view(2, 12, 3)
    mine = zigzag_shard(whole, world(), 1)
    assert torch.equal(zigzag_unshard(mine, world(), 1), whole)
    mine.sum().backward()
    assert x.grad is not None
    distributed.all_reduce(x.grad)
    assert torch.equal(x.grad, torch.ones_like(x))
    with pytest.raises(ValueError, match=r"length 10, which 2 ranks cannot share.*multiple of 4"):
        zigzag_shard(torch.zeros(10), world(), 0)
    with pytest.raises(ValueError, match="length 3 on this rank; zigzag order has two"):
        zigzag_unshard(torch.zeros(3), world(), 0)


def check_heads_that_cannot_be_shared() -> None:
    q, k = torch.zeros(1, 3, 4, 8), torch.zeros(1, 6, 4, 8)
    with pytest.raises(ValueError, match="q has 3 heads, which 2 ranks cannot share"):
        all_to_all_attention(q, q, q, world())
    with pytest.raises(ValueError, match="k has 3 heads, which 2 ranks cannot share"):
        all_to_all_attention(k, q, q, world(), enable_gqa=True)


def check_ranks_that_differ() -> None:
    rank = distributed.get_rank()
    for attend in (ring_attention, all_to_all_attention):
        q = torch.zeros(1, 2, 6 - rank, 8)
        first = r"rank 0 was called with q of shape \[1, 2, 6, 8\] and torch.float32, and rank 1 "
        with pytest.raises(ValueError, match=first) as error:
            attend(q, q, q, world())
        assert "[1, 2, 5, 8]" in str(error.value)
        assert "whose length the number of ranks, 2, does not divide" in str(error.value)
        q = torch.zeros(1, 2, 6, 8, dtype=(torch.float16, torch.bfloat16)[rank])
        with pytest.raises(ValueError, match=r"torch\.float16, and rank 1 with .*bfloat16"):
            attend(q, q, q, world())
    q = torch.zeros(1, 2, 6, 8)
    with pytest.raises(ValueError, match=r"'is_causal': False.*'is_causal': True"):
        ring_attention(q, q, q, world(), is_causal=rank == 1)
    with patch.object(distributed, "all_gather", wraps=distributed.all_gather) as gather:
        for _ in range(2):  # asked once
            ring_attention_with_lse(q, q, q, world(), scale=0.25)
        assert gather.call_count == 1


def check_a_rank_that_never_calls() -> None:
    """What rank 0 raises, to which no other answers: at once, or from the second call on."""
    rank = distributed.get_rank()
    q = torch.zeros(1, 2, 6, 8)
    for attend in (ring_attention, all_to_all_attention):
        for calls in (0, 1):
            group = distributed.new_group(timeout=timedelta(seconds=4))
            assert isinstance(group, distributed.ProcessGroup)
            for _ in range(calls):
                attend(q, q, q, group)
            if rank == 0 and (attend is ring_attention or calls == 0):
                with pytest.raises(RuntimeError) as error:
                    attend(q, q, q, group)
                text = str(error.value)
                name = f"cudnn_ops.distributed.{attend.__name__}: rank 0 of 2 gave up while "
                doing = ("comparing shapes and dtypes", "passing keys and values to or from [1]")
                assert text.startswith(name + doing[calls]), text
                assert "timeout of torch.distributed.init_process_group or new_group" in text
                assert "4000ms" in text
            distributed.barrier()


CHECKS = [function for name, function in sorted(globals().items()) if name.startswith("check_")]
ON_CPUS_ALONE = {
    check_a_rank_that_never_calls,
    check_heads_that_cannot_be_shared,
    check_ranks_that_differ,
    check_zigzag,
}


def run(names: list[str]) -> None:
    for name in names:
        globals()[name]()


def test_on_cpus():
    run_in_processes(run, 2, [check.__name__ for check in CHECKS])


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_sums_among_more_ranks(ranks):
    run_in_processes(run, ranks, [check_what_is_kept_in_16_bits.__name__])


@pytest.mark.gpu
@pytest.mark.alone
def test_on_gpus():
    names = [check.__name__ for check in CHECKS if check not in ON_CPUS_ALONE]
    run_in_processes(run, 2, names, backend="nccl")
