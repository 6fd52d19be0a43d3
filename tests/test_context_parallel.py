"""Inside torch's context_parallel attention is by the ring, or refused.

The operators by themselves would see a rank's own keys alone.
"""

from __future__ import annotations

import sys
from typing import Any

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

    from cudnn_ops.distributed import zigzag_unshard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    query = torch.randn(1, 2, 32, 16)
    starts = torch.tensor([0, 16], dtype=torch.int32)
    attend, ops = cudnn_ops.scaled_dot_product_attention, torch.ops.cudnn_ops
    attend_with_lse = cudnn_ops.scaled_dot_product_attention_with_lse
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    compiled_op = torch.compile(lambda *args: ops.sdpa(*args).sin(), backend="aot_eager")
    expected = compiled(query, query, query)
    causal, lse = attend_with_lse(query, query, query, is_causal=True, window_size=(20, -1))
    packed = query[0].transpose(0, 1)
    with context_parallel(mesh, buffers=[query], buffer_seq_dims=[2]):
        whole, shard = expected.shape[2], query.shape[2]
        assert (whole, shard) == (32, 16)
        _check_refused((ops.sdpa, ops.sdpa_with_lse, compiled_op), query, query, query)
        # torch's context splits in zigzag order.
        for function in (attend, compiled):
            out = function(query, query, query)
            torch.testing.assert_close(zigzag_unshard(out, mesh, 2), expected)
        out, part = attend_with_lse(query, query, query, is_causal=True, window_size=(20, -1))
        torch.testing.assert_close(zigzag_unshard(out, mesh, 2), causal)
        torch.testing.assert_close(zigzag_unshard(part, mesh, 2), lse)
        leaf: Any = query.clone().requires_grad_()
        attend(leaf, leaf, leaf, is_causal=True).square().sum().backward()
        with pytest.raises(NotImplementedError, match="seq_lens_q and seq_lens_kv are not"):
            attend(query, query, query, seq_lens_kv=starts[:1])
        with pytest.raises(NotImplementedError, match="ring_attention does not support dropout_p"):
            attend(query, query, query, dropout_p=0.1)
        _check_refused(
            [lambda q: cudnn_ops.varlen_attention(q, q, q, starts, starts, 16, 16)], packed[:16]
        )
        pages = torch.zeros(1, 1, dtype=torch.int32)
        cache = packed[:16].unsqueeze(0)
        _check_refused([cudnn_ops.paged_attention], cache, cache, cache, pages, pages[0])
        cudnn_ops.rms_norm(query, (16,))  # of each token by itself
    torch.testing.assert_close(attend(query, query, query), expected)
    torch.testing.assert_close(compiled(query, query, query), expected)
    unsplit = query.clone().requires_grad_()
    attend(unsplit, unsplit, unsplit, is_causal=True).square().sum().backward()
    torch.testing.assert_close(zigzag_unshard(leaf.grad, mesh, 2), unsplit.grad)
    distributed.destroy_process_group()


def test_two_processes(tmp_path):
    spawn(_in_the_context, (str(tmp_path / "rendezvous"),), nprocs=2)
