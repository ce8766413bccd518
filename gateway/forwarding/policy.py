"""Forwarding policy of one model: `spec.routing` as numbers, in seconds. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from machinery.clock import NEVER
from schemas import duration
from schemas.routing import Routing

RECOVERY_S = 10.0
"""Small models restart within it."""
HOLD_S = 120.0
SILENCE_S = 120.0
"""The longest time without progress of an engine: mlx-serving's and the mesh's timeout of a request."""
# OpenAI's clients wait as long.
_EXTERNAL_S = 600.0
# The time until its agent starts an engine again, and until the gateway knows of it. Engines start slower when several do
# at once. A wait of more minutes belongs into `coldStart`, where its author sees it.
_NOTICE_S, _START_FACTOR, _LONGEST_RECOVERY_S = 5.0, 1.5, 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Concurrency and queue of a model."""

    concurrency: int
    depth: int
    timeout_s: float


class Deadline(NamedTuple):
    """Deadline of one request."""

    at_s: float = NEVER
    """By the gateway's monotonic clock."""
    timeout_s: float = NEVER
    """Seconds from the arrival of the request."""
    is_clients: bool = False
    """True if the client set it. The model's `timeouts.request` counts against a slow version, a client's does not."""


NO_DEADLINE = Deadline()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingPolicy:
    """Limits of one request."""

    attempts: int
    retry_percent: int
    request_s: float
    """From the arrival of the request to the end of its response."""
    silence_s: float
    """The longest time without progress of an engine."""
    external_silence_s: float
    """The longest wait for a whole answer of an external server, which shows no progress."""
    first_token_s: float
    hedge_after_s: float
    hedge_percent: int
    queue: QueuePolicy | None
    """None: unlimited."""
    resumptions: int
    """The number of times that a stream may continue on another engine."""
    resumable_tokens: int
    """The largest number of tokens of a resumable stream."""
    recovery_s: float
    """The longest wait while all replicas start again: of requests, and of streams whose engine died."""
    hold_s: float
    """The longest wait for a first replica, or for a slot while the engines take no more requests."""


def policy_of(
    routing: Routing,
    *,
    silence_s: float,
    recovery_s: float = RECOVERY_S,
    hold_s: float = HOLD_S,
    start_s: float = 0.0,
) -> ForwardingPolicy:
    """Return the policy; `silence_s`, `recovery_s` and `hold_s` are the gateway's defaults.

    `start_s`: seconds in which the model's engines started, 0 if unknown. Where nothing is declared, requests wait for
    a restart as long as it takes.
    """
    restart_s = min(_NOTICE_S + _START_FACTOR * start_s, _LONGEST_RECOVERY_S) if start_s else 0.0
    timeouts, hedging, queueing = routing.timeouts, routing.hedging, routing.queueing
    queue = cold_start_s = None
    if queueing is not None and queueing.cold_start is not None:
        cold_start_s = duration.parse(queueing.cold_start)
    if queueing is not None and queueing.concurrency is not None:
        queue = QueuePolicy(
            concurrency=queueing.concurrency,
            depth=queueing.depth,
            timeout_s=duration.parse(queueing.timeout),
        )
    return ForwardingPolicy(
        attempts=routing.retries.max_attempts,
        retry_percent=routing.retries.budget,
        request_s=_seconds(timeouts.request, NEVER),
        silence_s=_seconds(timeouts.attempt, silence_s),
        external_silence_s=_seconds(timeouts.attempt, max(silence_s, _EXTERNAL_S)),
        first_token_s=_seconds(timeouts.first_token, NEVER),
        hedge_after_s=_seconds(hedging.after if hedging else None, NEVER),
        hedge_percent=hedging.budget if hedging else 0,
        queue=queue,
        resumptions=routing.resumption.max_resumptions,
        resumable_tokens=routing.resumption.max_tokens,
        recovery_s=max(recovery_s, restart_s) if cold_start_s is None else cold_start_s,
        hold_s=hold_s if cold_start_s is None else cold_start_s,
    )


def _seconds(text: str | None, otherwise: float) -> float:
    return otherwise if text is None else duration.parse(text)


DEFAULT_POLICY = policy_of(Routing(), silence_s=SILENCE_S)
"""Policy of models without settings."""
