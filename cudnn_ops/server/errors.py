"""Errors as OpenAI's API tells them, with their status."""

from __future__ import annotations

import re

from fastapi.responses import JSONResponse

from cudnn_ops.server.generation import QueueFull, RequestFailed, Stopped
from cudnn_ops.serving import SamplingParams

#: By status: what kind of error it is.
_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
_KINDS |= {503: "service_unavailable"}
#: The engine's names of a request's fields, where they are others.
_FIELDS = {"stop_strings": "stop", "stop_tokens": "stop_token_ids", "logprobs": "top_logprobs"}


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for the client.
        param: the field of the request that is wrong.
        code: for programs.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, object]:
        """What the client gets."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        return JSONResponse(self.body(), self.status, headers)


def as_api_error(error: Exception) -> APIError:
    """What a client is told of an error that :class:`~cudnn_ops.server.AsyncEngine` raised."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFull):
        return APIError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, Stopped):
        return APIError(503, str(error), code="server_stopping")
    if isinstance(error, RequestFailed):
        return APIError(500, str(error), code="request_failed")
    if isinstance(error, ValueError):
        # Messages begin with the name of what is wrong.
        name = re.match(r"\w*", str(error))
        field = name[0] if name else ""
        known = field == "prompt" or field in SamplingParams.__dataclass_fields__
        return APIError(400, str(error), _FIELDS.get(field, field) if known else None)
    return APIError(500, f"{type(error).__name__}: {error}", code="internal_error")
