"""Refusals: what a client is told, in OpenAI's envelope, and what ends the process. No HTTP here.

What ends a group.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

ErrorType: TypeAlias = Literal["invalid_request_error", "rate_limit_error", "server_error"]
INVALID: ErrorType = "invalid_request_error"

_MAX_SUMMARY_CHARACTERS = 400


class StoppedError(Exception):
    """The process was asked to end while it was loading."""


class PromptRefusedError(Exception):
    """The model's own chat template refuses these messages."""


class GrammarError(Exception):
    """A schema or grammar that cannot be compiled; says which part and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One refusal as clients see it."""

    status: int
    message: str
    type: ErrorType = INVALID
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error envelope."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class RefusedError(Exception):
    """Carries a refusal to the edge, where it becomes a response."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def invalid(message: str, param: str | None = None, code: str | None = None) -> RefusedError:
    """Return the refusal of a request that no repetition makes right."""
    return RefusedError(Refusal(status=400, message=message, param=param, code=code))


def unavailable(message: str, code: str, *, retry_after_s: int) -> RefusedError:
    """Return the refusal of a request that another replica, or a later time, can serve."""
    return RefusedError(
        Refusal(
            status=503,
            message=message,
            type="server_error",
            code=code,
            retry_after_s=retry_after_s,
        )
    )


def draining() -> RefusedError:
    """Return the refusal of a request that came, or would have to end, after the stop."""
    message = "This replica is shutting down; repeat the request."
    return unavailable(message, "draining", retry_after_s=1)


def queue_full(concurrency: int, limit: int, *, retry_after_s: int) -> RefusedError:
    """Return the refusal of a request for which not even a place in the queue is left."""
    message = (
        f"This replica runs {concurrency} requests at once and {limit} more are waiting already. "
        f"Try again in {retry_after_s} s."
    )
    return RefusedError(
        Refusal(
            status=429,
            message=message,
            type="rate_limit_error",
            code="queue_full",
            retry_after_s=retry_after_s,
        )
    )


def internal(message: str) -> RefusedError:
    """Return the refusal for which the engine is to blame."""
    return RefusedError(Refusal(status=500, message=message, type="server_error"))


def summarize(error: BaseException) -> str:
    """Return an exception as one line of bounded length."""
    words = " ".join(str(error).split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return (
        text
        if len(text) <= _MAX_SUMMARY_CHARACTERS
        else f"{text[: _MAX_SUMMARY_CHARACTERS - 3]}..."
    )


class GroupError(Exception):
    """The group cannot go on: a rank is gone, silent, different, or no rank at all. All of it starts again."""
