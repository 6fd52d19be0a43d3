"""The requests of OpenAI's API: their fields, and the engine's options for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from cudnn_ops.server.errors import APIError
from cudnn_ops.serving import SamplingParams

#: As in OpenAI's API.
_MOST_CHOICES = 128
_MOST_LOGPROBS, _MOST_TOP_LOGPROBS = 5, 20
_DEFAULT_COMPLETION = 16

Tokens = list[Annotated[int, Field(ge=0, lt=2**63)]]
Text = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    """An object of a request: nothing is converted, and nothing unknown is overlooked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Null stands for a field's default."""
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(_Body):
    """``stream_options``."""

    include_usage: bool = False


class CommonRequest(_Body):
    """What both routes have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=_MOST_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Text | list[Text] = Field([], max_length=16)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    user: str | None = None  # these four change nothing
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    # Beyond OpenAI's, with vLLM's names.
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop_token_ids: Tokens = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False

    @field_validator("logit_bias")
    @classmethod
    def _has_tokens(cls, biases: dict[str, float]) -> dict[str, float]:
        for token in biases:
            if not (token.isascii() and token.isdecimal() and len(token) < 19):
                raise ValueError(f"keys must be token ids, got {token!r}")
        return biases

    @model_validator(mode="after")
    def _streams(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """How many log probabilities to tell at each token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        """The largest number of tokens to generate; None: as many as there is room for."""
        return self.max_tokens

    def params(self, room: int, stop_tokens: frozenset[int], index: int) -> SamplingParams:
        """The engine's options for one of the choices.

        Args:
            room: how many tokens may follow the prompt.
            stop_tokens: what ends an answer.
            index: of the choice, each of which has a seed of its own.

        Raises:
            ValueError: an option that the engine refuses.
        """
        wanted = self.wanted_tokens
        ends = frozenset(self.stop_token_ids)
        return SamplingParams(
            max_tokens=room if wanted is None else wanted,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + index,
            stop_tokens=ends if self.ignore_eos else ends | stop_tokens,
            stop_strings=[self.stop] if isinstance(self.stop, str) else self.stop,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            min_tokens=self.min_tokens,
            logprobs=self.wanted_logprobs,
        )


class CompletionRequest(CommonRequest):
    """The body of ``POST /v1/completions``."""

    prompt: str | list[str] | Tokens | list[Tokens]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=_MOST_LOGPROBS)

    @field_validator("prompt")
    @classmethod
    def _has_prompts(
        cls, prompt: str | list[str] | list[int] | list[list[int]]
    ) -> str | list[str] | list[int] | list[list[int]]:
        if not prompt or not all(part or part == 0 for part in prompt):
            raise ValueError("must not be empty")
        for part in [prompt] if isinstance(prompt, str) else prompt:
            if isinstance(part, str):
                check_text(part)
        return prompt

    @model_validator(mode="after")
    def _echoes(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo cannot be together with logprobs: those of a prompt are unknown")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        return [part for part in prompt if not isinstance(part, int)]

    @property
    def wanted_logprobs(self) -> int | None:
        """As :attr:`CommonRequest.wanted_logprobs`."""
        return self.logprobs

    @property
    def wanted_tokens(self) -> int | None:
        """As :attr:`CommonRequest.wanted_tokens`, with OpenAI's default."""
        return _DEFAULT_COMPLETION if self.max_tokens is None else self.max_tokens


class TextPart(_Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """One of the ``messages``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    def flat(self) -> dict[str, str]:
        """As chat templates read it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        check_text(content)
        flat = {"role": self.role, "content": content}
        return flat if self.name is None else flat | {"name": self.name}


class ChatRequest(CommonRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=_MOST_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        return self

    @property
    def wanted_logprobs(self) -> int | None:
        """As :attr:`CommonRequest.wanted_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """As :attr:`CommonRequest.wanted_tokens`; ``max_completion_tokens`` comes first."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


def check_text(text: str) -> None:
    """Raises ValueError for what JSON can say and no text is: halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text that can be encoded as UTF-8") from None


def as_invalid(details: list[Any], body: object) -> APIError:
    """The error of a body that does not fit, from pydantic's list of what is wrong."""
    if not isinstance(body, dict):
        return APIError(400, "the body must be a JSON object", code="invalid_json")
    first = details[0]
    # Of a union, the alternatives follow the field.
    path = [str(part) for part in first["loc"]]
    field = path[0] if path else None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        where = ".".join(path)
        return APIError(400, f"unsupported field: {where}", where, "unsupported_parameter")
    if first["type"] == "missing":
        where = ".".join(path)
        return APIError(400, f"missing field: {where}", where, "missing_parameter")
    text = message if field is None else f"{field}: {message}"
    return APIError(400, text, field, "invalid_value")
