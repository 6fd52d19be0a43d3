"""Many GPUs: attention over sequences that are split over them, sharded tensors."""

from importlib import import_module as _import_module

from cudnn_ops.distributed.all_to_all import (
    all_to_all_attention,
    all_to_all_attention_with_lse,
)
from cudnn_ops.distributed.heads import heads_of_rank
from cudnn_ops.distributed.order import zigzag_shard, zigzag_unshard
from cudnn_ops.distributed.ring import ring_attention, ring_attention_with_lse
from cudnn_ops.ops._when_imported import when_imported as _when_imported

# Behind the other operators', which it uses.
_when_imported("cudnn_ops.ops.flops", lambda _: _import_module("cudnn_ops.distributed.flops"))

__all__ = [
    "all_to_all_attention",
    "all_to_all_attention_with_lse",
    "heads_of_rank",
    "ring_attention",
    "ring_attention_with_lse",
    "zigzag_shard",
    "zigzag_unshard",
]
