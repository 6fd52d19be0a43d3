"""Serving many requests at once: a paged cache of keys and values, and an engine around a model."""

from cudnn_ops.serving.engine import Engine, EngineStats, GeneratedToken
from cudnn_ops.serving.kv_cache import CacheUsage, PagedKVCache
from cudnn_ops.serving.model_runner import Attend, Model
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.sampling import SamplingParams
from cudnn_ops.serving.scheduler import Request, RequestStats
from cudnn_ops.serving.sequence import KVSequence

__all__ = [
    "Attend",
    "CacheUsage",
    "Engine",
    "EngineStats",
    "GeneratedToken",
    "KVSequence",
    "Model",
    "OutOfPages",
    "PagedKVCache",
    "Request",
    "RequestStats",
    "SamplingParams",
]
