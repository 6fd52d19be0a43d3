"""The compile backend under FSDP2 and DDP: two processes learn what one does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cudnn_ops
from tests.cases.compiler import NAMES
from tests.distributed.processes import BACKENDS, device, mesh_of, run_in_processes

BATCH, LENGTH, SIZE = 4, 6, 32


class Block(nn.Module):
    """Attention and a norm, by torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE, 1e-6)
        self.qkv = nn.Linear(SIZE, 3 * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(device())


def _inputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LENGTH, SIZE, generator=generator).to(device())


def _gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    found = {}
    for name, weight in model.named_parameters():
        grad = weight.grad
        assert grad is not None
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name.replace("module.", "").replace("_orig_mod.", "")] = full.cpu()
    return found


def _run() -> dict[str, Any]:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    own = _inputs().chunk(size)[rank]
    options: Any = {"swap": NAMES}
    plain = _gradients(_model(), _inputs())
    sharded = _model()
    for block in sharded:
        block.compile(backend="cudnn_ops", options=options)
        fully_shard(block, mesh=mesh_of())
    fully_shard(sharded, mesh=mesh_of())
    of_fsdp = _gradients(sharded, own)
    swapped = [candidate.pattern for candidate in cudnn_ops.compile_report().swapped]
    torch._dynamo.reset()
    cudnn_ops.compile_report().clear()
    replicated = DistributedDataParallel(_model())
    of_ddp = _gradients(torch.compile(replicated, backend="cudnn_ops", options=options), own)
    again = [candidate.pattern for candidate in cudnn_ops.compile_report().swapped]
    return {"plain": plain, "fsdp": of_fsdp, "ddp": of_ddp, "swapped": (swapped, again)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_and_replicated_models(backend):
    for found in run_in_processes(_run, 2, backend=backend):
        for kind in ("fsdp", "ddp"):
            assert found[kind].keys() == found["plain"].keys()
            for name, grad in found["plain"].items():
                torch.testing.assert_close(found[kind][name], grad, rtol=1e-4, atol=1e-6)
        # The model is of float32, whose attention is torch's on a GPU.
        expected = {"rms_norm"} if backend == "nccl" else {"attention", "rms_norm"}
        for swapped in found["swapped"]:
            assert expected == set(swapped)
