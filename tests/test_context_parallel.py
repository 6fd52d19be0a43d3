"""Inside torch's context_parallel attention is refused: each rank would see its own keys alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

# Nothing of cudnn_ops is imported here: the processes do that in either order.


def _check_refused(functions, *args) -> None:
    message = r"inside torch\.distributed.*context_parallel each rank would"
    for function in functions:
        with pytest.raises(NotImplementedError, match=message):
            function(*args)


def _in_the_context(rank: int, rendezvous: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    if rank == 0:
        from torch.distributed.tensor.experimental import context_parallel
    import cudnn_ops

    # The operators' package imports none of it.
    assert ("torch.distributed.tensor.experimental" in sys.modules) == (rank == 0)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    query = torch.randn(1, 2, 32, 16)
    starts = torch.tensor([0, 16], dtype=torch.int32)
    attend, ops = cudnn_ops.scaled_dot_product_attention, torch.ops.cudnn_ops
    compiled = torch.compile(attend, backend="aot_eager")
    compiled_inside = torch.compile(lambda *args: attend(*args).sin(), backend="aot_eager")
    expected = compiled(query, query, query)
    packed = query[0].transpose(0, 1)
    with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
        whole, shard = expected.shape[2], query.shape[2]
        assert (whole, shard) == (32, 16)
        functions = (attend, ops.sdpa, ops.sdpa_with_lse, compiled, compiled_inside)
        _check_refused(functions, query, query, query)
        _check_refused(
            [lambda q: cudnn_ops.varlen_attention(q, q, q, starts, starts, 16, 16)], packed[:16]
        )
        pages = torch.zeros(1, 1, dtype=torch.int32)
        cache = packed[:16].unsqueeze(0)
        _check_refused([cudnn_ops.paged_attention], cache, cache, cache, pages, pages[0])
        cudnn_ops.rms_norm(query, (16,))  # of each token by itself
    torch.testing.assert_close(attend(query, query, query), expected)
    torch.testing.assert_close(compiled(query, query, query), expected)
    distributed.destroy_process_group()


def test_two_processes(tmp_path):
    spawn(_in_the_context, (str(tmp_path / "rendezvous"),), nprocs=2)
