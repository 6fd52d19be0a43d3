"""Answers of OpenAI's API, whole and in pieces."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cudnn_ops.server.generation import Update
from cudnn_ops.serving import TokenLogprobs

#: The text of one token.
TextOf = Callable[[int], str]


def event(data: object) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


DONE = "data: [DONE]\n\n"


@dataclass
class Choice:
    """One of the answers, as far as it is known."""

    prompt: str | None = None
    """What an answer begins with, if the client wants that."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    shown: int = 0
    """Characters of tokens whose log probabilities were told."""

    def add(self, update: Update) -> None:
        """Appends what is new."""
        self.tokens += len(update.tokens)
        self.pieces.append(update.text)
        self.logprobs += update.logprobs
        self.finish_reason = update.finish_reason

    @property
    def text(self) -> str:
        """All of it."""
        return (self.prompt or "") + "".join(self.pieces)


@dataclass
class Answer:
    """What the answers to one request have in common.

    Args:
        is_chat: whether it is one of ``/v1/chat/completions``.
        model: the served model's name.
        text_of: the text of one token.
        wants_logprobs: whether the client asked for log probabilities.
    """

    is_chat: bool
    model: str
    text_of: TextOf
    wants_logprobs: bool
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"

    def whole(self, choices: Sequence[Choice], usage: Mapping[str, object]) -> dict[str, object]:
        """The answer in one piece."""
        told = []
        for index, choice in enumerate(choices):
            body: dict[str, object] = {"index": index}
            if self.is_chat:
                body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
            else:
                body["text"] = choice.text
            body["logprobs"] = self._logprobs(choice, choice.logprobs)
            body["finish_reason"] = choice.finish_reason
            told.append(body)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, told) | {"usage": usage}

    def begin(self, index: int, choice: Choice) -> dict[str, object] | None:
        """The first piece of a choice, if there is one before its tokens."""
        if self.is_chat:
            return self._piece(index, {"delta": {"role": "assistant", "content": ""}}, None, None)
        if choice.prompt:
            return self._piece(index, {"text": choice.prompt}, None, None)
        return None

    def piece(self, index: int, choice: Choice, update: Update) -> dict[str, object]:
        """The piece of an update, which the choice has by now."""
        delta = {"content": update.text} if update.text or not update.finish_reason else {}
        content = {"delta": delta} if self.is_chat else {"text": update.text}
        logprobs = self._logprobs(choice, update.logprobs)
        return self._piece(index, content, logprobs, update.finish_reason)

    def end(self, usage: Mapping[str, object]) -> dict[str, object]:
        """The last piece, which tells the usage."""
        return self._body(self._kind_of_piece, []) | {"usage": usage}

    @property
    def _kind_of_piece(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _piece(
        self,
        index: int,
        content: Mapping[str, object],
        logprobs: object,
        finish_reason: str | None,
    ) -> dict[str, object]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._body(self._kind_of_piece, [choice])

    def _body(self, kind: str, choices: Sequence[object]) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprobs]) -> object:
        if not self.wants_logprobs:
            return None
        if self.is_chat:
            return {"content": [self._of_chat(each) for each in logprobs]}
        told: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for each in logprobs:
            text = self.text_of(each.token)
            told["tokens"].append(text)
            told["token_logprobs"].append(_finite(each.logprob))
            top = [*each.top, (each.token, each.logprob)]  # the chosen one is always among them
            told["top_logprobs"].append({self.text_of(token): _finite(x) for token, x in top})
            told["text_offset"].append(choice.shown)
            choice.shown += len(text)
        return told

    def _of_chat(self, each: TokenLogprobs) -> dict[str, object]:
        top = [self._entry(token, logprob) for token, logprob in each.top]
        return {**self._entry(each.token, each.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, object]:
        text = self.text_of(token)
        # The bytes of a part of a character are not known from its text.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def usage_of(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, object]:
    """How many tokens were read and written."""
    written = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; this is what OpenAI tells in its place."""
    return max(logprob, -9999.0)
