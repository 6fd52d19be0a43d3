"""What the server asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to tokens and back.

    :class:`cudnn_ops.integrations.transformers_serving.ServedTokenizer` is one.
    """

    @property
    def stop_tokens(self) -> frozenset[int]:
        """What ends an answer."""
        ...

    @property
    def has_chat(self) -> bool:
        """Whether :meth:`encode_chat` is there."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with what belongs before it. Called by one thread."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins. Called by that thread.

        Args:
            messages: each with ``role`` and ``content``.

        Raises:
            ValueError: there is no template, or it refuses these messages.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens."""
        ...
