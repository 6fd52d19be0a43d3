"""A Llama over two processes computes and learns what it does in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cudnn_ops.nn import ConvAct1d, LayerNorm, PackedSwiGLU, RMSNorm, SwiGLU
from examples.llama import Llama, LlamaConfig, Operators
from examples.parallel import checkpoint_blocks, compile_blocks, shard_data, shard_tensors
from examples.train_llama_pipeline import Trainer
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
    distribute_module(model.get_submodule("blocks.0.attention.rotary"), mesh)
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


class Modules(nn.Module):
    """The package's own, from [B, S, 32] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(32, eps=1e-6, zero_centered=True), LayerNorm(32)
        self.gated, self.packed = SwiGLU(32, 96), PackedSwiGLU(32, 48, activation="gelu")
        self.conv = ConvAct1d(32, 32, 3, padding=1, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gated(self.first(x))
        x = x + self.packed(self.second(x))
        return self.conv(x.transpose(1, 2), x.transpose(1, 2)).transpose(1, 2)


def check_modules(mesh: DeviceMesh) -> None:
    """Modules with sharded parameters, between which the tokens are sharded."""
    torch.manual_seed(0)
    alone, model = (Modules().to(device()) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    of_tokens = Shard(1)
    whole_rows = PrepareModuleInput(input_layouts=of_tokens, desired_input_layouts=Replicate())
    reduced = RowwiseParallel(output_layouts=of_tokens, use_local_output=False)
    parallelize_module(
        model,
        mesh,
        {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "gated": whole_rows,
            "gated.gate_proj": ColwiseParallel(),
            "gated.up_proj": ColwiseParallel(),
            "gated.down_proj": reduced,
            "packed": whole_rows,
            # Halves of one projection: a process's own part is no half of each.
            "packed.gate_up_proj": ColwiseParallel(use_local_output=False),
            "packed.down_proj": reduced,
        },
    )
    distribute_module(model.conv, mesh, output_channels)
    x = torch.randn(4, 6, 32, device=device())
    out = alone(x)
    out.square().mean().backward()
    sharded = model(distribute_tensor(x, mesh, [of_tokens]))
    sharded.square().mean().backward()
    tolerance = 1e-4 if device().type == "cpu" else 2e-2
    assert_near(full(sharded), out, "output", tolerance)
    for (name, weight), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert weight.grad is not None
        assert expected.grad is not None
        assert_near(full(weight.grad), expected.grad, name, tolerance)


def output_channels(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a convolution as ``ColwiseParallel`` shards a linear layer."""
    for key, weight in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))


def check_pipeline() -> None:
    """Each stage's gradients are the whole model's."""
    alone = make_model()
    windows = some_windows()
    expected, gradients = step(alone, lambda: alone.loss(windows))
    trainer = Trainer(make_model(), microbatches=2, learning_rate=1e-2)
    loss = trainer.step(windows)
    tolerance = 2e-5 if device().type == "cpu" else 2e-2
    if loss is not None:
        assert loss == pytest.approx(expected.item(), rel=tolerance)
    first = 0 if trainer.stage.is_first else 1
    for name, weight in trainer.stage.named_parameters():
        # One of the two layers is here, and it is this stage's number 0.
        whole = name.replace("blocks.0", f"blocks.{first}")
        assert weight.grad is not None
        assert_near(weight.grad, gradients[whole], whole, tolerance)


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
    check_modules(mesh)
    check_pipeline()


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama(backend):
    run_in_processes(check_training, 2, backend=backend)
