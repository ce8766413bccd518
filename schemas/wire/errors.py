"""The error envelope of every HTTP API of the fleet, in OpenAI's form, and the one exception that carries it.

    raise errors.invalid("'n' must be at least 1.", param="n")

The edge of a process turns `RefusedError.refusal` into a response with `status`, `headers()` and `body()`.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Literal, Self, TypeAlias

ErrorType: TypeAlias = Literal[
    "invalid_request_error", "rate_limit_error", "server_error", "refused"
]
"""OpenAI's values of `error.type`; `refused` is the agent's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refused request: HTTP status, error envelope and headers."""

    status: int
    message: str
    type: ErrorType | Literal[""] = ""
    """Empty: what the status stands for."""
    param: str | None = None
    """The field or header that is wrong, such as `messages[0].content`."""
    code: str | None = None
    """A constant that programs can compare, such as `model_not_found`."""
    retry_after_s: int | None = None
    """Value of `retry-after`. Every 429 has that header: 1 s if nothing is known."""
    extra_headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers beside `content-type` and `retry-after`: (name in lower case, value)."""

    def __post_init__(self) -> None:
        """Derive the type."""
        if not self.type:
            is_rate = self.status == HTTPStatus.TOO_MANY_REQUESTS
            of_client = "rate_limit_error" if is_rate else "invalid_request_error"
            object.__setattr__(self, "type", "server_error" if self.status >= 500 else of_client)

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error envelope."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """Return the envelope as JSON."""
        text = json.dumps(self.envelope(), ensure_ascii=False, separators=(",", ":"))
        # A message may quote half a surrogate pair of the request, which UTF-8 cannot spell.
        return text.encode(errors="replace")

    def event(self) -> bytes:
        """Return the envelope as a server-sent event, for a stream whose status was sent already."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the response headers in ASGI's form, without `content-length`."""
        headers = [(b"content-type", b"application/json")]
        retry_after_s = self.retry_after_s
        if retry_after_s is None and self.status == 429:
            retry_after_s = 1
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        headers += self.extra_headers
        return headers

    def http_response(self) -> bytes:
        """Return the whole HTTP response, after which the connection is closed."""
        body = self.body()
        fields = [
            *self.headers(),
            (b"connection", b"close"),
            (b"content-length", b"%d" % len(body)),
        ]
        lines = b"".join(b"%s: %s\r\n" % field for field in fields)
        phrase = HTTPStatus(self.status).phrase.encode()
        return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (self.status, phrase, lines, body)


class RefusedError(Exception):
    """A request is refused; the edge of the process answers with `refusal`."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """The part of an error envelope that other processes read."""

    message: str
    type: str | None
    code: str | None

    @classmethod
    def parse(cls, body: bytes) -> Self | None:
        """Return the error in a response body; None if the body is not an error envelope."""
        try:
            error = json.loads(body)["error"]
            message, kind, code = error["message"], error.get("type"), error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(message, str):
            return None
        return cls(
            message=message,
            type=kind if isinstance(kind, str) else None,
            code=code if isinstance(code, str) else None,
        )


def refused(
    status: int, message: str, code: str | None = None, *, retry_after_s: int | None = None
) -> RefusedError:
    """Return the refusal of a request."""
    refusal = Refusal(status=status, message=message, code=code, retry_after_s=retry_after_s)
    return RefusedError(refusal)


def invalid(message: str, param: str | None = None, code: str | None = None) -> RefusedError:
    """Return the refusal (400) of a request that fails however often it is repeated."""
    return RefusedError(Refusal(status=400, message=message, param=param, code=code))


CANCELLED_STATUS: Final = 499
"""The status of a cancelled request, as in gRPC's mapping of CANCELLED; clients do not repeat such a request."""


def cancelled() -> RefusedError:
    """Return the refusal of a request that an operator of the fleet cancelled; no other engine may answer it."""
    message = "This request was cancelled by an operator of the fleet."
    return refused(CANCELLED_STATUS, message, "request_cancelled")


def body_too_large(limit: int, model: str = "") -> RefusedError:
    """Return the refusal (413) of a request body over `limit` bytes, which is the limit of `model` if one is named."""
    message = f"The body is larger than {limit} bytes."
    if model:
        message = f"{message} No prompt that fits the context of the model '{model}' is as large."
    return refused(413, message, "body_too_large")


def unavailable(message: str, code: str, *, retry_after_s: int) -> RefusedError:
    """Return the refusal (503) of a request that another process, or this one later, can serve."""
    return refused(503, message, code, retry_after_s=retry_after_s)


def internal(message: str, code: str | None = None) -> RefusedError:
    """Return the refusal (500) of a request that failed by an error of ours."""
    return refused(500, message, code)
