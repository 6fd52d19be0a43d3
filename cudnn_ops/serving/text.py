"""The text of a request while it grows: tokens become characters, stop strings end it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Decode: TypeAlias = Callable[[list[int]], str]
"""The text of some tokens, such as ``tokenizer.decode``."""

#: What stands for bytes that are no character; at the end, perhaps for one that is not complete.
_REPLACEMENT = "\ufffd"
#: Tokens that an incomplete character may have: it has four bytes at most.
_PATIENCE = 8


def overlap(end: Sequence[object], stops: Sequence[Sequence[object]]) -> int:
    """The length of the longest end that a stop begins with, and is longer than."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(end)), 0, -1):
        tail = end[len(end) - length :]
        if any(len(stop) > length and stop[:length] == tail for stop in stops):
            return length
    return 0


class TextStream:
    """Text from tokens that come one after the other.

    Only the newest tokens are decoded, behind the ones before them: a tokenizer may write a token
    differently at the beginning of a text. Characters whose bytes are not all there wait.

    Args:
        decode: the text of some tokens.
        stops: strings that end the text.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._text = ""
        self._window: list[int] = []
        self._known = 0  # tokens of the window that are part of the text
        self.fed = 0
        """Tokens so far."""
        self.stop: str | None = None
        """The string that has ended it."""

    @property
    def state(self) -> dict[str, Any]:
        """What another stream of the same kind needs to go on."""
        return {name: value for name, value in vars(self).items() if name != "_decode"}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def feed(self, tokens: list[int], is_end: bool, searches: bool) -> None:
        """Appends tokens.

        Args:
            tokens: those that follow.
            is_end: whether no others will follow, so that nothing waits.
            searches: whether a stop string that ends in what is appended is one.
        """
        self._window += tokens
        self.fed += len(tokens)
        if self._known == len(self._window):
            return
        text = self._decode(self._window)
        waiting = len(self._window) - self._known
        if text.endswith(_REPLACEMENT) and not is_end and waiting <= _PATIENCE:
            return
        known = self._decode(self._window[: self._known]) if self._known else ""
        before = len(self._text)
        self._text += text[len(known) :]
        self._window = self._window[self._known :]
        self._known = len(self._window)
        if searches and self._stops:
            self._search(before)

    def shown(self, is_end: bool) -> str:
        """The text without an end with which a stop string may begin, if others will follow."""
        held = 0 if is_end else overlap(self._text, self._stops)
        return self._text[: len(self._text) - held]

    def _search(self, before: int) -> None:
        """Cuts the text at the first stop string that ends after ``before``."""
        found = [
            (at, stop)
            for stop in self._stops
            if (at := self._text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stop = min(found, key=lambda each: each[0])
            self._text = self._text[:at]
