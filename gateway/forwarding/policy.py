"""What one name's `spec.routing` asks of retries, times, hedging and queues, in seconds. Pure."""

from dataclasses import dataclass

from schemas import duration
from schemas.routing import Routing

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """How many requests of a name are let through, and how many wait before."""

    concurrency: int
    depth: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingPolicy:
    """How a request is carried."""

    attempts: int
    retry_percent: int
    request_s: float
    """From its arrival to the end of its answer."""
    silence_s: float
    first_token_s: float
    hedge_after_s: float
    hedge_percent: int
    lines: QueuePolicy | None
    """None: everybody is let through."""
    resumptions: int
    """How often a stream may go on at another engine."""
    resumable_tokens: int
    """Of how many tokens it may be then."""


def policy_of(routing: Routing, *, silence_s: float) -> ForwardingPolicy:
    """Return what is asked for; `silence_s` is the gateway's own limit."""
    timeouts, hedging, queueing = routing.timeouts, routing.hedging, routing.queueing
    lines = None
    if queueing is not None:
        lines = QueuePolicy(
            concurrency=queueing.concurrency,
            depth=queueing.depth,
            timeout_s=duration.parse_fine(queueing.timeout),
        )
    return ForwardingPolicy(
        attempts=routing.retries.max_attempts,
        retry_percent=routing.retries.budget,
        request_s=_seconds(timeouts.request, NEVER),
        silence_s=_seconds(timeouts.attempt, silence_s),
        first_token_s=_seconds(timeouts.first_token, NEVER),
        hedge_after_s=_seconds(hedging.after if hedging else None, NEVER),
        hedge_percent=hedging.budget if hedging else 0,
        lines=lines,
        resumptions=routing.resumption.max_resumptions,
        resumable_tokens=routing.resumption.max_tokens,
    )


def _seconds(text: str | None, otherwise: float) -> float:
    return otherwise if text is None else duration.parse_fine(text)


DEFAULT_POLICY = policy_of(Routing(), silence_s=600.0)
"""Of names that ask for nothing."""
