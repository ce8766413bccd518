"""Log of HTTP requests: an id, an outcome and one log line for each, and its share of the metrics.

Log lines never contain text of a prompt or an answer. Lines of refused requests are limited, with a count of those left
out. Used on the event loop only.
"""

import logging
import random
from collections.abc import Container
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from starlette.types import Scope

from engine.admission import Arrival, ClaimedBytes, Ticket
from engine.metrics import EngineMetrics
from machinery.clock import Clock
from machinery.http_server import REQUEST_ID, TRACE_PARENT, TRACE_STATE
from schemas.wire import headers, in_flight
from schemas.wire.errors import CANCELLED_STATUS, RefusedError

RequestOutcome: TypeAlias = Literal[
    "ok", "invalid", "queue_full", "deadline", "unavailable", "error", "client_gone", "cancelled"
]
_OUTCOMES: dict[int, RequestOutcome] = {
    429: "queue_full",
    CANCELLED_STATUS: "cancelled",
    503: "unavailable",
    504: "deadline",
}
# The label of paths that do not exist: clients must not create label values.
_OTHER_ENDPOINT = "other"

# Lines of refused requests: one connection can cause a thousand a second, and fill a disk with them.
_BURST_LINES, _LINES_PER_S = 200.0, 5.0

# Of a `traceparent`: version, trace, span and flags, with a dash between them.
_TRACE_ID = slice(3, 35)

_CANCELLATIONS = f"{in_flight.ENGINE_PATH}/"
_REQUEST_ID = headers.REQUEST_ID.encode()
_TRACE_PARENT = headers.TRACE_PARENT.encode()
_TRACE_STATE = headers.TRACE_STATE.encode()

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestRecord:
    """Record of one request. Times in seconds of `Clock.monotonic`."""

    id: str
    endpoint: str
    begun_s: float
    is_generation: bool
    """True if it asks the model for something. Health checks and scrapes are not logged."""
    status: int = 0
    """0 until the response starts."""
    is_answered: bool = False
    """True if the last byte of the response was sent."""
    model: str = ""
    ticket: Ticket | None = None
    arrival: Arrival | None = None
    """Its place until it gets a ticket."""
    body: ClaimedBytes | None = None
    """The memory of its body."""
    trace_parent: bytes = b""
    """Its valid `traceparent`; empty if there is none."""
    trace_state: bytes = b""
    """Its `tracestate`; empty if there is none, and if this engine records no spans."""
    cancellation: RefusedError | None = None
    """The refusal with which it ends if it is cancelled before it gets a ticket."""

    @property
    def trace_id(self) -> str:
        """The trace in its `traceparent`; empty if there is none."""
        return self.trace_parent[_TRACE_ID].decode("ascii")

    def leave(self) -> None:
        """Give back the place of the arrival and the memory of the body, when the response begins or the request ends."""
        if self.arrival is not None:
            self.arrival.leave()
        if self.body is not None:
            self.body.release()

    def finished_reason(self) -> str:
        """Return why the engine made no further token: stop, length, abort or error, as vLLM."""
        match self.outcome():
            case "ok":
                return "length" if self.ticket is not None and self.ticket.is_cut else "stop"
            case "error" | "unavailable":
                return "error"
            case _:
                return "abort"

    def outcome(self) -> RequestOutcome:
        """Return the outcome; for a stream that broke off, the reason."""
        if not self.is_answered:
            return "client_gone"
        late = self.ticket.refusal if self.ticket is not None else None
        status = late.status if late is not None and self.status < 400 else self.status
        if status < 400:
            return "ok"
        return _OUTCOMES.get(status, "invalid" if status < 500 else "error")


class SpanRecorder(Protocol):
    """Records the spans of requests for a collector of traces."""

    def record(self, record: RequestRecord, *, ended_s: float, epoch_s: float) -> None:
        """Record an ended request. `epoch_s`: the time since 1970 when the record's clock was 0."""
        ...

    def close(self) -> None:
        """Send what remains; blocks for a moment."""
        ...


@dataclass(slots=True)
class LineBudget:
    """A token bucket for the log lines of requests that cost a client nothing, and the number of lines left out."""

    left_out: int = 0
    """Lines that were not logged since the last one."""
    _tokens: float = _BURST_LINES
    _filled_s: float = 0.0

    def take(self, now_s: float) -> bool:
        """Return whether one more line may be logged now."""
        self._tokens = min(_BURST_LINES, self._tokens + (now_s - self._filled_s) * _LINES_PER_S)
        self._filled_s = now_s
        if self._tokens < 1:
            self.left_out += 1
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True, kw_only=True)
class RequestLog:
    """Begins and ends records. Between the two, each coroutine of a request finds its own record."""

    metrics: EngineMetrics
    clock: Clock
    entropy: random.Random
    spans: SpanRecorder | None = None
    """None if tracing is not configured."""
    _current: ContextVar[RequestRecord] = field(default_factory=lambda: ContextVar("record"))
    _refused_lines: LineBudget = field(default_factory=lambda: LineBudget())
    _open: dict[RequestRecord, None] = field(default_factory=dict)

    def under_way(self) -> tuple[RequestRecord, ...]:
        """Return the records of requests for generation that have not ended, oldest first."""
        return tuple(self._open)

    def begin(self, scope: Scope, endpoints: Container[str]) -> RequestRecord:
        """Return a new record and make it the current one; `endpoints` are the paths that exist."""
        request_id = _header_value(scope, _REQUEST_ID)
        trace = _header_value(scope, _TRACE_PARENT)
        path = scope["path"]
        is_valid = REQUEST_ID.fullmatch(request_id) is not None
        record = RequestRecord(
            id=request_id.decode("ascii")
            if is_valid
            else (f"{self.entropy.getrandbits(128):032x}"),
            endpoint=path if path in endpoints else _OTHER_ENDPOINT,
            begun_s=self.clock.monotonic(),
            is_generation=scope["method"] == "POST" and not path.startswith(_CANCELLATIONS),
            trace_parent=trace if TRACE_PARENT.fullmatch(trace) else b"",
        )
        if self.spans is not None and record.trace_parent:
            state = _header_value(scope, _TRACE_STATE)
            record.trace_state = state if TRACE_STATE.fullmatch(state) else b""
        self._current.set(record)
        if record.is_generation:
            self._open[record] = None
        return record

    def attach_body(self, body: ClaimedBytes) -> None:
        """Store the memory of the current request's body; its record gives it back."""
        record = self._current.get(None)
        if record is not None:
            record.body = body

    def attach_arrival(self, arrival: Arrival) -> None:
        """Store the place of the current request; its record gives it back."""
        record = self._current.get(None)
        if record is not None:
            record.arrival = arrival

    @property
    def current_id(self) -> str:
        """The ID of the current request; "" outside of one."""
        record = self._current.get(None)
        return "" if record is None else record.id

    def current_arrival(self) -> Arrival | None:
        """Return the place of the current request."""
        record = self._current.get(None)
        return None if record is None else record.arrival

    def attach_ticket(self, ticket: Ticket, *, model: str) -> RefusedError | None:
        """Store the ticket and the model of the current request; return its refusal if it was cancelled before."""
        record = self._current.get(None)
        if record is None:
            return None
        record.ticket, record.model = ticket, model
        if log.isEnabledFor(logging.DEBUG):
            has_slot = ticket.started_s is not None or not ticket.jobs
            fields = {
                "request_id": record.id,
                "model": model,
                "prompt_tokens": ticket.prompt_tokens,
            }
            message = "request has a slot" if has_slot else "request waits for a slot"
            log.debug(message, extra=fields)
        return record.cancellation

    def end(self, record: RequestRecord) -> None:
        """Count and log a request."""
        record.leave()
        self._open.pop(record, None)
        now_s, outcome = self.clock.monotonic(), record.outcome()
        self.metrics.requests.add(record.endpoint, outcome)
        if not record.is_generation:
            return
        line: dict[str, object] = {
            "request_id": record.id,
            "endpoint": record.endpoint,
            "status": record.status,
            "outcome": outcome,
            "total_s": round(now_s - record.begun_s, 4),
        }
        if record.trace_id:
            line["trace_id"] = record.trace_id
        if record.ticket is not None:
            line |= self._observe(record, record.ticket)
        if outcome == "ok":
            self.metrics.times.whole.observe(now_s - record.begun_s, record.endpoint)
        self._write(line, now_s, has_answer=record.ticket is not None)
        if self.spans is not None:
            epoch_s = self.clock.now().timestamp() - now_s
            self.spans.record(record, ended_s=now_s, epoch_s=epoch_s)

    def _write(self, line: dict[str, object], now_s: float, *, has_answer: bool) -> None:
        """Log a line. The metrics count every request, so lines of refused ones may be left out."""
        if not has_answer and not self._refused_lines.take(now_s):
            return
        if self._refused_lines.left_out:
            line["left_out"] = self._refused_lines.left_out
            self._refused_lines.left_out = 0
        log.info("request", extra=line)

    def _observe(self, record: RequestRecord, ticket: Ticket) -> dict[str, object]:
        """Observe the times of a request; return them as fields of its log line."""
        line: dict[str, object] = {
            "model": record.model,
            "prompt_tokens": ticket.prompt_tokens,
            "cached_tokens": ticket.cached_tokens,
            "completion_tokens": ticket.completion_tokens,
        }
        metrics, endpoint = self.metrics, record.endpoint
        metrics.finished.add(endpoint, record.finished_reason())
        if ticket.started_s is not None:
            queued_s = ticket.started_s - ticket.entered_s
            metrics.times.queue.observe(queued_s, endpoint)
            line["queue_s"] = round(queued_s, 4)
        if ticket.first_s is not None:
            metrics.prompt_tokens.add(count=ticket.prompt_tokens)
            metrics.times.prompt_lengths.observe(ticket.prompt_tokens, endpoint)
            metrics.times.answer_lengths.observe(ticket.completion_tokens, endpoint)
            first_s = ticket.first_s - record.begun_s
            metrics.times.first_token.observe(first_s, endpoint)
            line["ttft_s"] = round(first_s, 4)
            if ticket.started_s is not None:
                metrics.times.prefill.observe(ticket.first_s - ticket.started_s, endpoint)
                metrics.times.decode.observe(ticket.last_s - ticket.first_s, endpoint)
                metrics.times.inference.observe(ticket.last_s - ticket.started_s, endpoint)
            if (per_token_s := ticket.per_token_s()) is not None:
                metrics.times.per_token.observe(per_token_s, endpoint)
        return line


def _header_value(scope: Scope, name: bytes) -> bytes:
    """Return the first header of that name; empty if there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")
