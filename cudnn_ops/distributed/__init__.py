"""Many GPUs: attention over sequences that are split over them, sharded tensors."""

from cudnn_ops.distributed.all_to_all import (
    all_to_all_attention,
    all_to_all_attention_with_lse,
)
from cudnn_ops.distributed.order import zigzag_shard, zigzag_unshard
from cudnn_ops.distributed.ring import ring_attention, ring_attention_with_lse

__all__ = [
    "all_to_all_attention",
    "all_to_all_attention_with_lse",
    "ring_attention",
    "ring_attention_with_lse",
    "zigzag_shard",
    "zigzag_unshard",
]
