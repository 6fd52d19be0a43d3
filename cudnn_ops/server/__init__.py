"""Serving over HTTP with OpenAI's routes, and the engine for asyncio that it is made of.

:mod:`cudnn_ops.server.app` makes the application; it alone needs FastAPI and prometheus-client.
"""

from cudnn_ops.server.async_engine import AsyncEngine
from cudnn_ops.server.generation import Generation, QueueFull, RequestFailed, Stopped, Update
from cudnn_ops.server.tokenizer import Tokenizer

__all__ = [
    "AsyncEngine",
    "Generation",
    "QueueFull",
    "RequestFailed",
    "Stopped",
    "Tokenizer",
    "Update",
]
