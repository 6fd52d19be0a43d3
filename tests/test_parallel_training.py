"""A Llama over two processes computes and learns what it does in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from examples.llama import Llama, LlamaConfig, Operators
from examples.parallel import checkpoint_blocks, compile_blocks, shard_data, shard_tensors
from tests.distributed.processes import BACKENDS, device, mesh_of, run_in_processes

CONFIG = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, sequence=16, vocabulary=48)
BATCH = 4


def make_model() -> Llama:
    """The same in every process."""
    torch.manual_seed(0)
    return Llama(CONFIG, Operators.named("cudnn_ops")).to(device())


def some_windows() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    windows = torch.randint(CONFIG.vocabulary, (BATCH, 17), generator=generator)
    return windows.to(device())


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    """Without what wrappers add."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(part, "")
    return name


def step(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients before one step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    value = loss()
    value.backward()
    gradients = {
        plain_name(name): full(weight.grad).clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    optimizer.step()
    return value.detach(), gradients


def assert_near(actual: Tensor, expected: Tensor, name: str, tolerance: float) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(
        actual.float(),
        expected.float(),
        rtol=0.0,
        atol=tolerance * largest,
        msg=lambda message: f"{name}: {message}",
    )


def check(
    parallelize: Callable[[Llama], nn.Module], windows: Tensor, tolerance: float | None = None
) -> None:
    """Loss, gradients and the weights after a step against those of one process.

    ``windows`` are this process's; the loss of all is compared where they differ.
    """
    if tolerance is None:
        tolerance = 2e-5 if device().type == "cpu" else 2e-2
    alone = make_model()
    expected, expected_gradients = step(alone, lambda: alone.loss(some_windows()))
    model = make_model()
    wrapped = parallelize(model)
    value, gradients = step(wrapped, lambda: model_loss(wrapped, windows))
    value = full(value)
    if len(windows) < BATCH:
        distributed.all_reduce(value)
        value = value / distributed.get_world_size()
    assert_near(value, expected, "loss", tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_near(gradient, expected_gradients[name], f"gradient of {name}", tolerance)
    stepped = dict(alone.named_parameters())
    for name, weight in wrapped.named_parameters():
        name = plain_name(name)
        # AdamW's first step is the gradient's sign, which is certain where that is not near 0.
        gradient = expected_gradients[name].abs()
        certain = gradient > 2 * tolerance * gradient.max()
        torch.testing.assert_close(full(weight)[certain], stepped[name][certain], msg=name)


def model_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """``Llama.loss`` through the wrapper's forward, which has its hooks."""
    logits = model(windows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def tensor_parallel(model: Llama, mesh: DeviceMesh, backend: str | None = None) -> Llama:
    if backend is not None:
        compile_blocks(model, backend)
    shard_tensors(model, mesh)
    return model


def sharded_attention(model: Llama, mesh: DeviceMesh) -> Llama:
    """Tensor parallel with sharded tensors within attention and the feed-forward network too."""
    shard_tensors(model, mesh)
    within = ColwiseParallel(use_local_output=False)
    fresh = make_model()
    # All blocks have the same one.
    distribute_module(model.blocks[0].attention.rotary, mesh)
    for block, plain in zip(model.blocks, fresh.blocks, strict=True):
        for part, names in (
            ("attention", ("query", "key", "value")),
            ("feed_forward", ("gate", "up")),
        ):
            for name in names:
                # Undoes the first plan, whose outputs are plain.
                setattr(getattr(block, part), name, getattr(getattr(plain, part), name))
                parallelize_module(block, mesh, {f"{part}.{name}": within})
    return model


def fully_sharded(
    model: Llama,
    mesh: DeviceMesh,
    *,
    checkpoint: bool = False,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
) -> Llama:
    if checkpoint:
        checkpoint_blocks(model)
    if backend is not None:
        compile_blocks(model, backend)
    shard_data(model, mesh, dtype)
    return model


def check_training() -> None:
    mesh = mesh_of()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    windows = some_windows()
    own = windows.chunk(size)[rank]
    check(partial(tensor_parallel, mesh=mesh), windows)
    check(partial(tensor_parallel, mesh=mesh, backend="aot_eager"), windows)
    check(partial(sharded_attention, mesh=mesh), windows)
    check(partial(fully_sharded, mesh=mesh), own)
    check(partial(fully_sharded, mesh=mesh, checkpoint=True), own)
    check(partial(fully_sharded, mesh=mesh, checkpoint=True, backend="aot_eager"), own)
    check(partial(fully_sharded, mesh=mesh, dtype=torch.bfloat16), own, tolerance=5e-2)
    check(DistributedDataParallel, own)


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama(backend):
    run_in_processes(check_training, 2, backend=backend)
