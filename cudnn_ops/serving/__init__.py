"""Serving many requests at once: a paged cache of keys and values, and an engine around a model."""

from cudnn_ops.serving.choosing import NothingAllowed
from cudnn_ops.serving.contiguous_cache import CachedKV, KVCache
from cudnn_ops.serving.draft_model import DraftModel
from cudnn_ops.serving.engine import Engine
from cudnn_ops.serving.handover import KVReceiver, KVSender
from cudnn_ops.serving.kv_cache import CacheUsage, PagedKVCache
from cudnn_ops.serving.model_runner import Attend, Model
from cudnn_ops.serving.page_pool import OutOfPages
from cudnn_ops.serving.request import Request, TokenLogprobs
from cudnn_ops.serving.sampling import SamplingParams
from cudnn_ops.serving.sequence import KVSequence
from cudnn_ops.serving.speculation import PromptLookup
from cudnn_ops.serving.stats import EngineStats, RequestStats, SpeculationStats
from cudnn_ops.serving.step import GeneratedToken, Piece

__all__ = [
    "Attend",
    "CacheUsage",
    "CachedKV",
    "DraftModel",
    "Engine",
    "EngineStats",
    "GeneratedToken",
    "KVCache",
    "KVReceiver",
    "KVSender",
    "KVSequence",
    "Model",
    "NothingAllowed",
    "OutOfPages",
    "PagedKVCache",
    "Piece",
    "PromptLookup",
    "Request",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "TokenLogprobs",
]
