"""The names of :mod:`cudnn_ops.serving` that generate text."""

from cudnn_ops.serving import (
    Attend,
    DraftModel,
    Engine,
    EngineStats,
    GeneratedToken,
    KVReceiver,
    KVSender,
    Model,
    NothingAllowed,
    Piece,
    PromptLookup,
    Request,
    RequestStats,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)

__all__ = [
    "Attend",
    "DraftModel",
    "Engine",
    "EngineStats",
    "GeneratedToken",
    "KVReceiver",
    "KVSender",
    "Model",
    "NothingAllowed",
    "Piece",
    "PromptLookup",
    "Request",
    "RequestStats",
    "SamplingParams",
    "SpeculationStats",
    "TokenLogprobs",
]
