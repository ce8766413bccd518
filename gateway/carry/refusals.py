"""What clients are told of requests that were not, or not in time, carried to an engine. Decides nothing."""

from dataclasses import replace

import orjson

from gateway.carry.queueing import Queue
from gateway.errors import Refusal, RefusedError, invalid

TIMEOUT = "x-request-timeout"


def request_timeout(name: str, timeout_s: float, attempts: int) -> Refusal:
    """Return what to say when the request's own time is up."""
    asked = f"{attempts} replicas were asked" if attempts != 1 else "1 replica was asked"
    return Refusal(
        status=504,
        message=f"The answer of '{name}' was not complete within {timeout_s:g} s ({asked}); allow more time in the "
        f"header '{TIMEOUT}', or in spec.routing.timeouts.request if that is what limits it.",
        type="server_error",
        code="request_timeout",
    )


def bad_timeout(text: str, longest_s: float) -> RefusedError:
    """Return the refusal of a header that makes no sense, in the engine's words."""
    return invalid(
        f"The header '{TIMEOUT}' must be a number of seconds, above 0 and at most "
        f"{longest_s:.0f}, such as 2.5; it is {text[:50]!r}.",
        param=TIMEOUT,
    )


def queue_full(name: str, queue: Queue, retry_after_s: int) -> Refusal:
    """Return what to say when as many as may be wait already."""
    return Refusal(
        status=429,
        message=f"Of requests to '{name}', {queue.running} {_are(queue.running)} being answered and {queue.waiting} "
        f"{'waits' if queue.waiting == 1 else 'wait'}, which is all "
        f"that spec.routing.queueing allows; try again in {retry_after_s} s.",
        type="rate_limit_error",
        code="queue_full",
        retry_after_s=retry_after_s,
    )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def queue_timeout(name: str, waited_s: float, retry_after_s: int) -> Refusal:
    """Return what to say to who waited for its turn in vain."""
    return Refusal(
        status=503,
        message=f"The request waited {waited_s:g} s for its turn at '{name}', which is all that "
        f"spec.routing.queueing.timeout allows; try again in {retry_after_s} s.",
        type="server_error",
        code="queue_timeout",
        retry_after_s=retry_after_s,
    )


def not_repeated(refusal: Refusal) -> Refusal:
    """Return the last refusal, and that it was the last because too many requests are being repeated."""
    message = (
        f"{refusal.message} No other was asked: so many requests fail now that repeating them all would make it "
        "worse (spec.routing.retries.budget)."
    )
    return replace(refusal, message=message, retry_after_s=refusal.retry_after_s or 1)


def said(status: int, body: bytes) -> Refusal:
    """Return an engine's refusal as one of ours: its status can be told no more, for an answer has begun."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        message, code = f"The replica answered a request for a stream with {status}.", None
    return Refusal(
        status=status,
        message=message,
        type="server_error" if status >= 500 else "invalid_request_error",
        code=code if isinstance(code, str) else None,
    )
