"""Refusals: what a client is told, in OpenAI's envelope. Decides nothing and sends nothing.

What clients are told of requests that never became one: their HTTP was wrong. Decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import orjson

ErrorType: TypeAlias = Literal["invalid_request_error", "rate_limit_error", "server_error"]

# A fleet may serve hundreds of names; a message is read by a person.
_NAMES_SHOWN = 20
# Long enough to load a small model, short enough that nobody waits for nothing.
_NOT_READY_RETRY_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refusal as clients see it."""

    status: int
    message: str
    type: ErrorType = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    more: tuple[tuple[bytes, bytes], ...] = ()
    """Headers of its own."""

    def body(self) -> bytes:
        """Return OpenAI's error envelope."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that belong to the body, but for its length."""
        found = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            found.append((b"retry-after", b"%d" % self.retry_after_s))
        found += self.more
        return found

    def event(self) -> bytes:
        """Return it as the last event of a stream that cannot go on."""
        return b"data: " + self.body() + b"\n\n"


class RefusedError(Exception):
    """Carries a refusal to the edge, where it becomes a response."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def invalid(message: str, param: str | None = None) -> RefusedError:
    """Return the refusal of a request that no repetition makes right."""
    return RefusedError(Refusal(status=400, message=message, param=param))


def too_large(limit: int) -> RefusedError:
    """Return the refusal of a body over the limit."""
    return RefusedError(
        Refusal(
            status=413, message=f"The body is larger than {limit} bytes.", code="body_too_large"
        )
    )


def unknown_model(name: str, known: Sequence[str], nearest: str | None) -> Refusal:
    """Return what to say of a model name that nobody declared."""
    shown = name if len(name) <= 200 else f"{name[:200]}..."
    message = f"The model '{shown}' does not exist. "
    if nearest is not None:
        message += f"Did you mean '{nearest}'? "
    if known:
        more = len(known) - _NAMES_SHOWN
        listed = ", ".join(known[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        message += f"This fleet serves: {listed}."
    else:
        message += "Nothing is deployed; `fleetctl apply` a ModelDeployment."
    return Refusal(status=404, message=message, param="model", code="model_not_found")


def nothing_ready(name: str, reason: str) -> Refusal:
    """Return what to say of a model that exists and that nobody serves right now."""
    return Refusal(
        status=503,
        message=f"No replica of '{name}' is ready. {reason}",
        type="server_error",
        code="model_not_ready",
        retry_after_s=_NOT_READY_RETRY_S,
    )


def model_starting(name: str, waited_s: float, reason: str) -> Refusal:
    """Return what to say of a model that was brought back from zero, and is not there yet."""
    return Refusal(
        status=503,
        message=f"The model '{name}' is starting and was not ready within {waited_s:g} s; repeat the "
        f"request. {reason}",
        type="server_error",
        code="model_starting",
        retry_after_s=_NOT_READY_RETRY_S,
    )


def too_many_waiting(name: str, limit: int) -> Refusal:
    """Return what to say when as many as may be wait for the model already."""
    return Refusal(
        status=429,
        message=f"The model '{name}' is starting, and {limit} requests wait for it already; repeat the "
        "request later.",
        type="rate_limit_error",
        code="model_starting",
        retry_after_s=_NOT_READY_RETRY_S,
    )


def not_synced() -> Refusal:
    """Return what to say before the first word from the store."""
    return Refusal(
        status=503,
        message="The gateway has not reached etcd since it started, so it knows no models yet.",
        type="server_error",
        code="not_synced",
        retry_after_s=2,
    )


def unreachable(name: str, attempts: int, why: str) -> Refusal:
    """Return what to say when no engine of the model took the connection."""
    return Refusal(
        status=503,
        message=f"No replica of '{name}' could be reached ({attempts} tried; the last: {why}).",
        type="server_error",
        code="upstream_unreachable",
        retry_after_s=1,
    )


def upstream_failed(name: str, attempts: int, why: str) -> Refusal:
    """Return what to say when engines took the request and did not answer it."""
    return Refusal(
        status=503,
        message=f"The replicas of '{name}' failed ({attempts} tried; the last: {why}).",
        type="server_error",
        code="upstream_failed",
        retry_after_s=1,
    )


def upstream_silent(name: str, why: str) -> Refusal:
    """Return what to say when an engine took longer than anybody waits."""
    return Refusal(
        status=504,
        message=f"The replica of '{name}' did not answer in time: {why}.",
        type="server_error",
        code="upstream_timeout",
    )


def shutting_down() -> Refusal:
    """Return what to say to requests that outlast the gateway's drain."""
    return Refusal(
        status=503,
        message="The gateway is shutting down; repeat the request.",
        type="server_error",
        code="gateway_shutting_down",
        retry_after_s=1,
    )


def internal() -> Refusal:
    """Return what to say when it is a mistake of ours; the log has more."""
    message = "The gateway made a mistake; the request was not answered. Its log says more."
    return Refusal(status=500, message=message, type="server_error", code="internal_error")


def interrupted(why: str) -> Refusal:
    """Return what ends a stream whose engine is gone; its status was sent long ago."""
    return Refusal(
        status=502,
        message=f"The stream was interrupted: {why}.",
        type="server_error",
        code="stream_interrupted",
    )


def head_too_large(limit: int) -> Refusal:
    """Return the refusal of headers over the limit."""
    message = f"The request's headers are larger than {limit} bytes."
    return Refusal(status=431, message=message, code="headers_too_large")


def too_many_headers(limit: int) -> Refusal:
    """Return the refusal of more headers than anybody needs."""
    message = f"The request has more than {limit} headers."
    return Refusal(status=431, message=message, code="headers_too_large")


def not_http() -> Refusal:
    """Return what to say to bytes that are no HTTP/1.1."""
    message = "This is not a valid HTTP/1.1 request; the connection is closed."
    return Refusal(status=400, message=message, code="invalid_http")


def wrong_origin(origin: str) -> Refusal:
    """Return the refusal of a web page that may not use the gateway."""
    message = (
        f"Web pages from {origin[:200]} may not use this gateway; its operator can allow them with "
        f"--cors-origin {origin[:200]}."
    )
    return Refusal(status=403, message=message, code="origin_not_allowed")


def compressed(coding: str) -> Refusal:
    """Return the refusal of a body that is not plain."""
    message = (
        f"The body is compressed ('content-encoding: {coding[:50]}'), and compressed bodies are not taken here; "
        "send it plain, and leave that header out."
    )
    return Refusal(status=415, message=message, code="body_compressed")


def too_slow(seconds: float) -> Refusal:
    """Return what to say of a request that does not come."""
    message = f"The request did not arrive within {seconds:g} s."
    return Refusal(status=408, message=message, code="body_timeout")
