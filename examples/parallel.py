"""Spreads the Llama of `llama.py` over a mesh of processes, by what PyTorch has for that.

Tensor parallelism splits heads and the feed-forward network's width; between them the residual
stream and its norms are split by tokens. Context parallelism splits the sequence, over which only
attention looks beyond a process's own tokens. Data parallelism splits the batch, and stores a part
of every weight in each process.
"""

from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from examples.llama import Llama, Rotary, SelfAttention, SwiGLU


def shard_tensors(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism over a mesh of one dimension, in place.

    The tokens are the same in all processes of the mesh, and so are the logits.

    Raises:
        ValueError: processes cannot share the heads evenly.
    """
    config, size = model.config, mesh.size()
    if config.kv_heads % size != 0:
        raise ValueError(f"{size} processes cannot share {config.kv_heads} key heads evenly")
    of_tokens = Shard(1)
    whole_rows = PrepareModuleInput(input_layouts=of_tokens, desired_input_layouts=Replicate())
    reduced = RowwiseParallel(output_layouts=of_tokens, use_local_output=False)
    parallelize_module(
        model,
        mesh,
        {
            "": PrepareModuleOutput(output_layouts=Shard(2), desired_output_layouts=Replicate()),
            "embedding": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=of_tokens, use_local_output=False
            ),
            "norm": SequenceParallel(),
        },
    )
    # The output projection, tied to the embedding, is split by the vocabulary.
    gathered = PrepareModuleOutput(
        output_layouts=of_tokens, desired_output_layouts=Replicate(), use_local_output=False
    )
    parallelize_module(model, mesh, {"norm": gathered})
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": whole_rows,
                # Attention itself sees this process's heads as plain tensors.
                **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
                "attention.out": reduced,
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": whole_rows,
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": reduced,
            },
        )


def shard_for_serving(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism of `Llama.serve` over a mesh of one dimension, in place.

    The weights become plain tensors, each process's own part of heads and of the feed-forward
    network's width. What each layer adds to the residual stream is summed over the processes: two
    collectives a layer, which CUDA graphs capture. The vocabulary is split for the output
    projection, and whole in the embedding.

    Raises:
        ValueError: processes cannot share the heads, the width or the vocabulary evenly.
    """
    from cudnn_ops.distributed import heads_of_rank  # on demand, as in llama.py

    config = model.config
    _, kv_heads = heads_of_rank(config.heads, config.kv_heads, mesh)
    size, rank = mesh.size(), mesh.get_local_rank()
    for name, length in (("hidden channels", config.hidden), ("tokens", config.vocabulary)):
        if length % size != 0:
            raise ValueError(f"{size} processes cannot share {length} {name} evenly")
    group = mesh.get_group()

    def keep_own(linear: nn.Module, dim: int) -> None:
        assert isinstance(linear, nn.Linear)
        own = linear.weight.detach().chunk(size, dim)[rank]
        linear.weight = nn.Parameter(own.clone(), requires_grad=False)

    def sum_up(module: nn.Module, inputs: object, output: Tensor) -> None:
        distributed.all_reduce(output, group=group)

    def project(x: Tensor, weight: Tensor) -> Tensor:
        own = F.linear(x, weight.chunk(size)[rank])
        parts = own.new_empty(size * own.shape[0], own.shape[1])
        distributed.all_gather_into_tensor(parts, own, group=group)
        return parts.unflatten(0, (size, -1)).transpose(0, 1).flatten(1)

    for module in model.modules():
        if isinstance(module, SelfAttention):
            keep_own(module.query, 0)
            # One key head is copied to all.
            for linear in (module.key, module.value) if kv_heads < config.kv_heads else ():
                keep_own(linear, 0)
            last = module.out
        elif isinstance(module, SwiGLU):
            keep_own(module.gate, 0)
            keep_own(module.up, 0)
            last = module.down
        else:
            continue
        keep_own(last, 1)
        last.register_forward_hook(sum_up)
    model.project = project


def split_sequence(model: Llama, mesh: DeviceMesh) -> None:
    """Context parallelism over a mesh of one dimension, in place.

    Each process then computes with its own tokens of every window (`own_part`), and attends to all
    by the ring.
    """
    from cudnn_ops.distributed import ring_attention  # on demand, as in llama.py

    attend = partial(ring_attention, mesh=mesh, order="zigzag")
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.operators = module.operators._replace(attention=attend)
        elif isinstance(module, Rotary):  # one for all layers
            module.register_buffer("cos", own_part(module.cos, mesh, 0), persistent=False)
            module.register_buffer("sin", own_part(module.sin, mesh, 0), persistent=False)


def own_part(tensor: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """What a process has of a dimension that goes along the sequence, after `split_sequence`."""
    from cudnn_ops.distributed import zigzag_shard

    return zigzag_shard(tensor, mesh, dim=dim)


def checkpoint_blocks(model: Llama) -> None:
    """Keeps of each block its input alone, and computes it again in the backward."""
    for name, block in model.blocks.named_children():
        model.blocks.register_module(name, checkpoint_wrapper(block))


def compile_blocks(model: Llama, backend: str = "inductor") -> None:
    """Compiles one block for all; collectives of data parallelism stay between them."""
    for block in model.blocks:
        block.compile(backend=backend)


def shard_data(model: Llama, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Fully sharded data parallelism over a mesh of one dimension, in place.

    Args:
        model: may be tensor parallel over another mesh.
        mesh: each of its processes has other tokens.
        dtype: what blocks compute in; gradients are summed in float32. None for the weights' own.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
