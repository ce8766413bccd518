"""Recorder: writes each finished request to journal, metrics, time series and trace.

It runs once for each request, so its cost must not depend on earlier requests.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from gateway.http.request_context import RequestContext
from gateway.metrics.gateway_metrics import GatewayMetrics, ProcessMetrics
from gateway.state.table_cache import TableCache
from gateway.telemetry.request_journal import (
    JournalEntry,
    JournalWriter,
    RequestJournal,
    session_digest,
    truncate,
)
from gateway.telemetry.time_series import RateSeries
from gateway.upstream import request_encoder
from gateway.upstream.request_encoder import Trace
from machinery.clock import Clock
from schemas.wire import headers as wire_headers

_SWEEP_INTERVAL_S = 60.0
# Enough for a UUID or a URL.
_LONGEST_NAME = 200
_TRACE_PARENT = wire_headers.TRACE_PARENT.encode()
_NOT_OF_THE_TABLE = ("", "unknown")


class Tracer(Protocol):
    """Records traces."""

    def begin(self, context: RequestContext, time_s: float) -> Trace:
        """Begin the trace of a request, or continue the client's."""
        ...

    def end(self, context: RequestContext, entry: JournalEntry) -> None:
        """End the trace with the outcome of the request."""
        ...

    def close(self) -> None:
        """Flush and stop; may take a moment."""
        ...


@dataclass(slots=True, kw_only=True)
class RequestRecorder:
    """Records all requests of one gateway."""

    table_cache: TableCache
    metrics: GatewayMetrics
    clock: Clock
    journal: RequestJournal
    process: ProcessMetrics
    file: JournalWriter | None = None
    tracer: Tracer | None = None
    series: RateSeries = field(default_factory=RateSeries)
    since_s: float = 0.0
    """Start of the gateway, in seconds since 1970."""
    _epoch_s: float = 0.0
    """The zero of the monotonic clock, in seconds since 1970."""

    def __post_init__(self) -> None:
        self._set_clock()
        self.since_s = self.clock.now().timestamp()

    def begin(self, context: RequestContext) -> None:
        """Continue the client's trace."""
        if self.tracer is not None:
            context.retry_state.trace = self.tracer.begin(context, self._epoch_s)
            return
        http_request = context.http_request
        if _TRACE_PARENT not in http_request.fields:
            return
        parent, trace_state = request_encoder.parse_context(http_request.headers)
        if parent:
            context.retry_state.trace = request_encoder.PassthroughTrace(
                request_encoder.trace_lines(parent, trace_state)
            )

    def record(self, context: RequestContext) -> None:
        """Record a finished request."""
        state, endpoint = context.retry_state, context.retry_state.served_by
        now_s = self.clock.monotonic()
        began_s = context.began_s or now_s
        request, principal, model = context.request, context.principal, context.model
        model_state = state.terms.model_state
        entry = JournalEntry(
            self._epoch_s + began_s,
            context.http_request.request_id,
            context.http_request.path,
            model if request is None or model == request.model else truncate(request.model),
            principal.name if principal is not None else "",
            _session_label(request.session) if request is not None and request.session else "",
            context.response.is_streamed,
            context.response.status,
            context.outcome,
            model_state.routing.strategy if model_state is not None else "",
            endpoint,
            state.attempts,
            state.resumptions,
            state.queued_s,
            context.first_s - began_s if context.first_s else 0.0,
            now_s - began_s,
            *state.usage,
        )
        self._count(model, entry)
        if context.is_identified:
            self.journal.add(entry)
            self.series.add(entry)
            if self.file is not None:
                self.file.add(entry)
        if self.tracer is not None:
            self.tracer.end(context, entry)

    def _count(self, model: str, entry: JournalEntry) -> None:
        endpoint = entry.served_by
        metrics = self.metrics.served.of(model, endpoint.replica if endpoint is not None else "")
        metrics.count(entry.outcome, entry.whole_s)
        if entry.queued_s:
            metrics.queue.observe(entry.queued_s)
        else:
            metrics.queue.counts[0] += 1
        if entry.first_s:
            metrics.first_token.observe(entry.first_s)
            if entry.output_tokens > 1 and entry.outcome == "ok":
                spent_s = entry.whole_s - entry.first_s
                metrics.per_token.observe(spent_s / (entry.output_tokens - 1))
        if entry.prompt_tokens:
            metrics.prompt.count += entry.prompt_tokens
            metrics.cached.count += entry.cached_tokens
        metrics.output.count += entry.output_tokens

    async def run(self) -> None:
        """Run the background work of all records, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.process.run())
            group.create_task(self._sweep())
            if self.file is not None:
                group.create_task(self.file.run())

    async def _sweep(self) -> None:
        """Follow changes of the wall clock, and drop the metrics of models and replicas that are gone."""
        gone_before: frozenset[str] = frozenset()
        while True:
            await self.clock.sleep(_SWEEP_INTERVAL_S)
            self._set_clock()
            gone_before = self.sweep(gone_before)

    def sweep(self, seen_before: frozenset[str]) -> frozenset[str]:
        """Drop metrics of replicas that are neither known now nor were at the last sweep; return the known ones."""
        models = self.table_cache.table.models
        replicas = frozenset(
            endpoint.replica
            for model in models.values()
            for backend in model.backends
            for endpoint in (*backend.leased, *backend.orphans)
        )
        # A replica that ended with requests in flight is counted once more.
        known = replicas | seen_before | frozenset(_NOT_OF_THE_TABLE)
        self.metrics.drop_gone(models.keys() | set(_NOT_OF_THE_TABLE), known)
        return replicas

    def _set_clock(self) -> None:
        self._epoch_s = self.clock.now().timestamp() - self.clock.monotonic()


def _session_label(session: str) -> str:
    """Return the session for the journal; a long name is replaced by its digest."""
    return session if len(session) <= _LONGEST_NAME else session_digest(session)
