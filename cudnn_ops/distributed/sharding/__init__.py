"""Sharding rules of all operators for ``torch.distributed.tensor.DTensor``.

Imported when ``torch.distributed.tensor`` is, which takes long and which few programs need.
"""

from cudnn_ops.distributed.sharding import adaptive_norm as adaptive_norm
from cudnn_ops.distributed.sharding import attention as attention
from cudnn_ops.distributed.sharding import batch_norm as batch_norm
from cudnn_ops.distributed.sharding import conv as conv
from cudnn_ops.distributed.sharding import group_norm as group_norm
from cudnn_ops.distributed.sharding import linear as linear
from cudnn_ops.distributed.sharding import max_pool as max_pool
from cudnn_ops.distributed.sharding import moe as moe
from cudnn_ops.distributed.sharding import norm as norm
from cudnn_ops.distributed.sharding import paged as paged
from cudnn_ops.distributed.sharding import pointwise as pointwise
from cudnn_ops.distributed.sharding import quantize as quantize
