"""Sharded calls of every operator against the same calls in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import cudnn_ops
from tests.distributed import sharding_cases as cases
from tests.distributed.processes import BACKENDS, device, mesh_of, run_in_processes

#: Compiled too, for compiling takes long: one of each family and kind of rule.
COMPILED = {
    "grouped batch",
    "grouped heads",
    "one key head",
    "sinks by heads",
    "mask of scores",
    "by tokens",
    "packed options",
    "layer by tokens",
    "sum of partial sums",
    "swiglu 2",
    "rotary by heads",
    "channels of silu",
    "pages",
    "append",
}


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: cases.Placements) -> DTensor:
    """Like torch's, and for partial sums: each process has a share."""
    placements = placements if isinstance(placements, tuple) else (placements,)
    if not any(placement == Partial() for placement in placements):
        return distribute_tensor(tensor, mesh, placements)
    share = tensor / mesh.size()
    return DTensor.from_local(share, mesh, placements, run_check=False)


def distribute_like(tensor: Tensor, like: Tensor) -> DTensor:
    """A gradient of a result, sharded as that is."""
    assert isinstance(like, DTensor)
    placements = [Replicate() if one.is_partial() else one for one in like.placements]
    return distribute_tensor(tensor, like.device_mesh, placements)


def assert_near(actual: Tensor, expected: Tensor, name: str) -> None:
    assert isinstance(actual, DTensor), f"{name} is no DTensor"
    # Parts are computed by the same kernels, and sums over processes in another order.
    finite = expected[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    tolerance = 8 * torch.finfo(expected.dtype).eps * max(largest, 1.0)
    whole = actual.full_tensor()
    torch.testing.assert_close(
        whole, expected, rtol=0.0, atol=tolerance, msg=lambda message: f"{name}: {message}"
    )


def gradients_of(
    outputs: Sequence[Tensor], tensors: dict[str, Any], weights: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Of the sum of the results under weights."""
    sources = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    if not sources:
        return {}
    found = torch.autograd.grad(outputs, list(sources.values()), weights)
    return dict(zip(sources, found, strict=True))


def some_weights(like: Tensor) -> Tensor:
    count = like.numel()
    return torch.linspace(-1, 2, count, device=device()).sin().view(like.shape).to(like.dtype)


def has_gradient(case: cases.Case, name: str, tensor: Tensor) -> bool:
    return (
        case not in cases.SERVING
        and tensor.is_floating_point()
        and name not in ("alibi_slopes", "cos", "sin", "mean")
    )


def check(case: cases.Case, mesh: DeviceMesh, compiled: bool) -> None:
    dtype = torch.float64 if device().type == "cpu" else torch.float16
    whole = case.make(device(), dtype)
    for name, tensor in whole.items():
        tensor.requires_grad_(has_gradient(case, name, tensor))
    try:
        expected = as_tuple(case.call(**whole))
    except NotImplementedError:
        # Of some cases a GPU supports none, sharded or not.
        if device().type == "cpu":
            raise
        return
    weights = [some_weights(out.detach()) for out in expected]
    expected_gradients = gradients_of(expected, whole, weights)
    sharded = {
        name: distribute(
            tensor.detach(), mesh, case.placements.get(name, (Replicate(),) * mesh.ndim)
        ).requires_grad_(tensor.requires_grad)
        for name, tensor in whole.items()
    }
    call = case.call
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with CommDebugMode() as of_forward:
        actual = as_tuple(call(**sharded))
    weights = [distribute_like(one, out) for one, out in zip(weights, actual, strict=True)]
    with CommDebugMode() as of_backward:
        gradients = gradients_of(actual, sharded, weights)
    if case.silent:
        assert of_forward.get_total_counts() == 0, of_forward.get_comm_counts()
        assert of_backward.get_total_counts() == 0, of_backward.get_comm_counts()
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_near(one, other, f"result {i}")
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_near(gradient, expected_gradients[name], f"gradient of {name}")


def run_cases(some: Sequence[cases.Case], mesh: DeviceMesh) -> None:
    failures = []
    for case in some:
        for compiled in (False, True) if case.name in COMPILED else (False,):
            try:
                check(case, mesh, compiled)
            except Exception as error:
                mode = "compiled" if compiled else "eager"
                failures.append(f"in {case.name!r}, {mode}: {error!r}")
    assert not failures, "\n".join(failures)


def check_everything() -> None:
    mesh = mesh_of()
    every = [*cases.DIFFERENTIABLE, *cases.SERVING]
    run_cases([case for case in every if mesh.size() in case.sizes], mesh)
    check_inference(mesh)
    if mesh.size() == 4:
        run_cases(cases.TWO_DIMENSIONS, mesh_of(2, 2))
        check_refusals(mesh)
    check_dropout(mesh, (Shard(0),))
    check_dropout(mesh, (Shard(1),))
    check_dropout(mesh, (Replicate(),))
    if mesh.size() == 4:
        check_dropout(mesh_of(2, 2), (Replicate(), Shard(1)))
        check_dropout(mesh_of(2, 2), (Shard(0), Shard(1)))


def check_inference(mesh: DeviceMesh) -> None:
    """Where autograd is skipped, calls arrive with the shapes that they were made with."""
    with torch.inference_mode():
        whole = torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(3))
        whole = whole.to(device(), torch.float16)
        query = distribute_tensor(whole, mesh, [Shard(0)])
        # Its first dimension is the heads.
        out = cudnn_ops.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert isinstance(out, DTensor)
        expected = cudnn_ops.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        torch.testing.assert_close(out.full_tensor(), expected)


def check_refusals(mesh: DeviceMesh) -> None:
    """Over four processes: key heads that cannot be shared, and caches that would have to move."""

    def sharded(*shape: int, by: Placement) -> DTensor:
        return distribute_tensor(
            torch.zeros(shape, dtype=torch.float16, device=device()), mesh, [by]
        )

    query, keys = sharded(2, 8, 4, 8, by=Shard(1)), sharded(2, 2, 4, 8, by=Replicate())
    torn = r"query has 8 heads, sharded as \(Shard\(dim=1\),\) over a mesh \(4,\), and key has 2"
    for attend in (
        cudnn_ops.scaled_dot_product_attention,
        torch.compile(cudnn_ops.scaled_dot_product_attention, backend="aot_eager"),
    ):
        with pytest.raises(Exception, match=torn):
            attend(query, keys, keys, enable_gqa=True)
    tokens, few = sharded(6, 12, 8, by=Shard(1)), sharded(6, 6, 8, by=Shard(1))
    starts = distribute_tensor(cases.lengths(0, 6).to(device()), mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"varlen_attention: q has 12 heads.* and k has 6"):
        cudnn_ops.varlen_attention(tokens, few, few, starts, starts, 6, 6)
    cache, new = sharded(4, 4, 4, 8, by=Shard(0)), sharded(2, 4, 8, by=Replicate())
    slots = distribute_tensor(torch.tensor([0, 1], device=device()), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"key_cache has the placement S(hard)?\((dim=)?0\)"):
        cudnn_ops.paged_kv_append_(cache, cache, new, new, slots)
    query_of_pages, pages = sharded(1, 1, 4, 8, by=Shard(2)), sharded(2, 4, 4, 8, by=Shard(2))
    table = distribute_tensor(torch.zeros(1, 1, dtype=torch.int32, device=device()), mesh)
    with pytest.raises(ValueError, match="out is written in place and has the placements"):
        cudnn_ops.paged_attention(
            query_of_pages,
            pages,
            pages,
            table,
            table[0],
            out=sharded(1, 1, 4, 8, by=Replicate()),
        )
    with pytest.raises(RuntimeError, match="got mixed"):
        cudnn_ops.scaled_dot_product_attention(query, query, query.full_tensor())


def check_dropout(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    """Copies drop the same, shards do not, and the backward drops what the forward dropped."""
    torch.manual_seed(distributed.get_rank())  # in different states, as they may be
    heads = length = 8
    query = torch.zeros(4, heads, length, length, device=device(), dtype=torch.float16)
    # All weights are the same, so that the output is what is left of them.
    value = torch.eye(length, device=device(), dtype=torch.float16).expand_as(query)
    weights = some_weights(query).view_as(query)
    for compiled in (False, True):
        attend = cudnn_ops.scaled_dot_product_attention
        if compiled:
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        q, k, v = (
            distribute_tensor(x.contiguous(), mesh, placements) for x in (query, query, value)
        )
        v.requires_grad_()
        out = attend(q, k, v, dropout_p=0.5)
        assert isinstance(out, DTensor)
        assert out.placements == placements
        out.backward(distribute_tensor(weights, mesh, placements))
        whole = out.full_tensor().detach()
        copies = [torch.empty_like(whole) for _ in range(distributed.get_world_size())]
        distributed.all_gather(copies, whole)
        assert all(torch.equal(whole, copy) for copy in copies)
        dropped = (whole == 0).float().mean().item()
        assert 0.4 < dropped < 0.6
        assert isinstance(v.grad, DTensor)
        torch.testing.assert_close(
            v.grad.full_tensor(), whole.transpose(-1, -2) @ weights, rtol=2e-3, atol=2e-3
        )
        parts = {tuple((part != 0).flatten().tolist()) for part in whole.flatten(0, 1)}
        assert len(parts) == 4 * heads, "two heads of the batch drop the same"


def test_every_operator_with_kernels_has_a_rule():
    dispatcher = DTensor._op_dispatcher
    known = {*dispatcher.sharding_propagator.op_strategy_funcs, *dispatcher._custom_op_handlers}
    names = {str(op) for op in known}
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    ours = [name.replace("::", ".") for name in kernels if name.startswith("cudnn_ops::")]
    # Their arguments are each rank's own part: a sharded tensor is refused.
    ours = [name for name in ours if not name.startswith("cudnn_ops._ring_attention")]
    # The compile backend puts it in, and not in the place of sharded tensors.
    ours.remove("cudnn_ops._gated_")
    ours.remove("cudnn_ops._fold_batch_norms")
    # Of ring attention's parts.
    ours.remove("cudnn_ops._merge_attention_state_")
    assert len(ours) > 10
    assert [name for name in ours if f"{name}.default" not in names] == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_operator(size, backend):
    run_in_processes(check_everything, size, backend=backend)
