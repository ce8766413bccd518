"""One HTTP request's story: its id, what became of it, and the line that is logged at its end.

Never a word of a prompt or an answer. On the event loop alone.
"""

import logging
import random
from collections.abc import Container
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from starlette.types import Scope

from engine.admission import Ticket
from engine.metrics import EngineMetrics
from machinery.clock import Clock
from machinery.http_server import REQUEST_ID, TRACE_PARENT

RequestOutcome: TypeAlias = Literal[
    "ok", "invalid", "queue_full", "deadline", "unavailable", "error", "client_gone"
]
_OUTCOMES: dict[int, RequestOutcome] = {429: "queue_full", 503: "unavailable", 504: "deadline"}
# Whoever asks for anything else has made it up, and must not make up a label too.
_OTHER_ENDPOINT = "other"

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """One request. Times in seconds of `Clock.monotonic`."""

    id: str
    endpoint: str
    begun_s: float
    is_generation: bool
    """Whether it asks for something to be made; looks at health and metrics are not told of one by one."""
    status: int = 0
    """0 until an answer starts."""
    is_answered: bool = False
    """Whether the last byte of the answer was handed over."""
    model: str = ""
    ticket: Ticket | None = None
    trace_id: str = ""
    """The trace that it belongs to, as its headers say; empty if to none."""

    def outcome(self) -> RequestOutcome:
        """Return how it ended; of a stream that broke off, why."""
        if not self.is_answered:
            return "client_gone"
        late = self.ticket.refusal if self.ticket is not None else None
        status = late.status if late is not None and self.status < 400 else self.status
        if status < 400:
            return "ok"
        return _OUTCOMES.get(status, "invalid" if status < 500 else "error")


@dataclass(slots=True, kw_only=True)
class RequestLog:
    """Begins and ends visits; between the two, `current` finds the one a coroutine works for."""

    metrics: EngineMetrics
    clock: Clock
    entropy: random.Random
    _current: ContextVar[RequestRecord] = field(default_factory=lambda: ContextVar("visit"))

    def begin(self, scope: Scope, endpoints: Container[str]) -> RequestRecord:
        """Return a new visit, which is the current one from now on; `endpoints` are the paths that exist."""
        given = _header_value(scope, b"x-request-id")
        trace = TRACE_PARENT.fullmatch(_header_value(scope, b"traceparent"))
        path = scope["path"]
        visit = RequestRecord(
            id=given.decode("ascii") if REQUEST_ID.fullmatch(given) else self._fresh(),
            endpoint=path if path in endpoints else _OTHER_ENDPOINT,
            begun_s=self.clock.monotonic(),
            is_generation=scope["method"] == "POST",
            trace_id=trace[1].decode("ascii") if trace is not None else "",
        )
        self._current.set(visit)
        return visit

    def entered(self, ticket: Ticket, *, model: str) -> None:
        """Note for what model the current visit got a place."""
        visit = self._current.get(None)
        if visit is not None:
            visit.ticket, visit.model = ticket, model

    def end(self, visit: RequestRecord) -> None:
        """Count it and log it."""
        now_s, outcome = self.clock.monotonic(), visit.outcome()
        self.metrics.requests.add(visit.endpoint, outcome)
        if not visit.is_generation:
            return
        line: dict[str, object] = {
            "request_id": visit.id,
            "endpoint": visit.endpoint,
            "status": visit.status,
            "outcome": outcome,
            "total_s": round(now_s - visit.begun_s, 4),
        }
        if visit.trace_id:
            line["trace_id"] = visit.trace_id
        if visit.ticket is not None:
            line |= self._measured(visit, visit.ticket)
        if outcome == "ok":
            self.metrics.whole.observe(now_s - visit.begun_s, visit.endpoint)
        log.info("request", extra=line)

    def _measured(self, visit: RequestRecord, ticket: Ticket) -> dict[str, object]:
        found: dict[str, object] = {
            "model": visit.model,
            "prompt_tokens": ticket.prompt_tokens,
            "cached_tokens": ticket.cached,
            "completion_tokens": ticket.made,
        }
        if ticket.started_s is not None:
            waited_s = ticket.started_s - ticket.entered_s
            self.metrics.queue.observe(waited_s, visit.endpoint)
            found["queue_s"] = round(waited_s, 4)
        if ticket.first_s is not None:
            self.metrics.prompt_tokens.add(count=ticket.prompt_tokens)
            first_s = ticket.first_s - visit.begun_s
            self.metrics.first_token.observe(first_s, visit.endpoint)
            found["ttft_s"] = round(first_s, 4)
            if (per_token_s := ticket.per_token_s()) is not None:
                self.metrics.per_token.observe(per_token_s, visit.endpoint)
        return found

    def _fresh(self) -> str:
        return f"{self.entropy.getrandbits(128):032x}"


def _header_value(scope: Scope, wanted: bytes) -> bytes:
    """Return the first of that name; empty if there is none."""
    return next((value for name, value in scope["headers"] if name == wanted), b"")
