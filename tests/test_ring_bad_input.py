"""Attention over a split sequence refuses what it cannot compute, in words. A mesh of one."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import cudnn_ops
from cudnn_ops.distributed import (
    all_to_all_attention,
    all_to_all_attention_with_lse,
    ring_attention,
    ring_attention_with_lse,
    zigzag_shard,
)


@pytest.fixture(scope="module", autouse=True)
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def mesh(one_process):
    return init_device_mesh("cpu", (1,))


Q = torch.zeros(1, 4, 6, 8)
STARTS = torch.tensor([0, 6])
BOTH = pytest.mark.parametrize("attend", [ring_attention, all_to_all_attention])


@BOTH
def test_a_mesh_of_one_equals_the_operator(attend, mesh):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 10, 16, requires_grad=True) for h in (4, 2, 2))
    attend = {ring_attention: ring_attention_with_lse}.get(attend, all_to_all_attention_with_lse)
    options = {"is_causal": True, "enable_gqa": True, "window_size": (5, -1)}
    expected = cudnn_ops.scaled_dot_product_attention_with_lse(q, k, v, **options)
    grads = torch.autograd.grad(expected[0].sum(), (q, k, v))
    for order in ("contiguous", "zigzag"):
        actual = attend(q, k, v, mesh, order=order, **options)
        found = torch.autograd.grad(actual[0].sum(), (q, k, v))
        torch.testing.assert_close((*actual, *found), (*expected, *grads))


@BOTH
def test_a_sharded_tensor_is_refused(attend, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(Q, mesh, [Shard(2)])
    with pytest.raises(TypeError, match=r"k must be this rank's part, and is a DTensor; pass k\."):
        attend(Q, sharded, Q, mesh)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, r"q must be \[batch, heads, length, head size\]; got shape \[4,"),
        ({"k": Q.half()}, TypeError, "q has dtype torch.float32 and k torch.float16; cast them"),
        ({"v": Q.to("meta")}, ValueError, "q is on cpu and v on meta; move them to one device"),
        ({"q": Q[..., :7]}, ValueError, "q has head size 7 and k 8; they must be equal"),
        ({"v": Q[:, :, :5]}, ValueError, "k has 4 heads of length 6 and v 4 of length 5"),
        ({"q": Q.expand(3, -1, -1, -1)}, ValueError, "q has batch size 3 and k 1"),
        ({"q": Q[:, :2]}, ValueError, "q has 2 heads and k 4; they must be equal; pass enable_gqa"),
        (
            {"q": Q[:, :2], "enable_gqa": True},
            ValueError,
            "q has 2 heads and k 4; the first must be a multiple of the second",
        ),
        ({"order": "zig-zag"}, ValueError, 'order must be "contiguous" or "zigzag", got \'zig-'),
        ({"attn_mask": Q}, NotImplementedError, "does not support attn_mask: each rank"),
        ({"dropout_p": 0.5}, NotImplementedError, "does not support dropout_p: .*; got 0.5, it"),
        ({"window_size": 4}, TypeError, r"window_size must be \(left, right\), got 4"),
        ({"window_size": (-2, 0)}, ValueError, r"window_size must be .* got \(-2, 0\)"),
        ({"sinks": torch.zeros(3)}, ValueError, r"one floating-point number .* \[4\] on cpu; got"),
        ({"mesh": "cp"}, TypeError, "mesh must be a DeviceMesh or a ProcessGroup, got str"),
        ({"mesh_dim": 1, "mesh": None}, ValueError, "mesh_dim is for a DeviceMesh, and mesh is a"),
        ({"cu_seqlens": STARTS}, ValueError, r"q must be \[tokens, heads, head size\], for cu_seq"),
        *(
            ({name: Q[0].transpose(0, 1) for name in "qkv"} | {"cu_seqlens": starts}, *expected)
            for starts, *expected in (
                (STARTS.float(), ValueError, "int32 or int64 tensor .* on the CPU.* got torch.flo"),
                (STARTS.to("meta"), ValueError, r"on the CPU, .* \(cu_seqlens.cpu\(\), once for a"),
                (torch.tensor([0, 5]), ValueError, r"from 0 to .*, 6 on all .*; got \[0, 5\] to 5"),
                (torch.tensor([0, 4, 3, 6]), ValueError, "must not decrease"),
            )
        ),
    ],
)
def test_wrong_arguments(attend, arguments, error, message, mesh):
    given = {"q": Q, "k": Q, "v": Q, "mesh": mesh} | arguments
    if given["mesh"] is None:
        given["mesh"] = distributed.group.WORLD
    with pytest.raises(error, match=message) as raised:
        attend(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("mesh"), **given)
    name = attend.__name__
    assert str(raised.value).startswith(f"cudnn_ops.distributed.{name}"), raised.value


@pytest.mark.parametrize(
    "attend", [ring_attention_with_lse, all_to_all_attention, all_to_all_attention_with_lse]
)
def test_an_argument_that_is_not_there(attend, mesh):
    with pytest.raises(TypeError, match="has no argument 'causal'; it has mesh_dim, order, attn_"):
        attend(Q, Q, Q, mesh, causal=True)


def test_what_the_ring_alone_refuses(mesh):
    message = "ring_attention does not support alibi_slopes: .*; all_to_all_attention supports them"
    with pytest.raises(NotImplementedError, match=message):
        ring_attention(Q, Q, Q, mesh, alibi_slopes=torch.zeros(4))
    odd = Q[:, :, :5]
    message = "q has 5 tokens on this rank; zigzag order has two equal chunks a rank"
    for attend in (ring_attention, all_to_all_attention):
        with pytest.raises(ValueError, match=message):
            attend(odd, odd, odd, mesh, order="zigzag")
    message = r"ring_attention: softcap must be finite and positive, or 0 for none, got -1"
    compiled = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    for function in (ring_attention, compiled):
        with pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match=message):
            function(Q, Q, Q, mesh, softcap=-1.0)


def test_a_mesh_of_several_dimensions():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    message = r"mesh has 2 dimensions, \('dp', 'cp'\); name the one .* mesh_dim='cp'"
    for function in (ring_attention, all_to_all_attention):
        with pytest.raises(ValueError, match=message):
            function(Q, Q, Q, mesh)
    with pytest.raises(ValueError, match="zigzag_shard: mesh has 2 dimensions"):
        zigzag_shard(Q, mesh, 2)
    assert ring_attention(Q, Q, Q, mesh, mesh_dim="cp").shape == Q.shape
