"""Recorder: writes each finished request to journal, metrics, time series and trace.

The cost of a request must not depend on earlier ones.
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
# A slice takes about half a millisecond. Of many requests an eighth is counted at once: they must not become more.
_COUNT_INTERVAL_S, _SLICE, _PART = 0.1, 100, 8
# Enough for a UUID or a URL.
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
    """Records all requests of one gateway.

    Finished requests are counted within a tenth of a second, in slices between other work. What is read here has all
    of them.
    """

    table_cache: TableCache
    clock: Clock
    process: ProcessMetrics
    counted_metrics: GatewayMetrics
    """The metrics, without the latest requests."""
    counted_journal: RequestJournal
    """The journal, without the latest requests."""
    file: JournalWriter | None = None
    tracer: Tracer | None = None
    since_s: float = 0.0
    """Start of the gateway, in seconds since 1970."""
    _series: RateSeries = field(default_factory=RateSeries)
    _uncounted: list[tuple[str, bool, JournalEntry]] = field(default_factory=list)
    """Finished requests that are not counted yet: the model, whether the client is identified, the entry."""
    _epoch_s: float = 0.0
    """The zero of the monotonic clock, in seconds since 1970."""

    def __post_init__(self) -> None:
        self._set_clock()
        self.since_s = self.clock.now().timestamp()

    @property
    def metrics(self) -> GatewayMetrics:
        """The metrics, with all finished requests."""
        self.count()
        return self.counted_metrics

    @property
    def journal(self) -> RequestJournal:
        """The journal, with all finished requests."""
        self.count()
        return self.counted_journal

    @property
    def series(self) -> RateSeries:
        """The time series, with all finished requests."""
        self.count()
        return self._series

    def begin(self, context: RequestContext) -> None:
        """Continue the client's trace."""
        if self.tracer is not None:
            context.retry_state.trace = self.tracer.begin(context, self._epoch_s)
            return
        http_request = context.http_request
        if _TRACE_PARENT not in http_request.fields:
            return
        parent, trace_state = request_encoder.parse_context(http_request)
        if parent:
            context.retry_state.trace = request_encoder.PassthroughTrace(
                request_encoder.trace_lines(parent, trace_state)
            )

    def record(self, context: RequestContext) -> None:
        """Record a finished request."""
        state, request, http_request = context.retry_state, context.request, context.http_request
        principal, model_state, model = context.principal, state.terms.model_state, context.model
        now_s = self.clock.monotonic()
        began_s, first_s, name, session = context.began_s or now_s, context.first_s, model, ""
        if request is not None:
            if request.model != model:
                name = truncate(request.model)
            if request.session:
                session = session_digest(request.session)
        prompt_tokens, cached_tokens, output_tokens = state.usage
        # By place: names would take longer.
        entry = JournalEntry(
            self._epoch_s + began_s,
            http_request.request_id.decode("ascii"),
            http_request.path,
            name,
            "" if principal is None else principal.name,
            session,
            context.response.is_streamed,
            context.response.status,
            context.outcome,
            "" if model_state is None else model_state.routing.strategy,
            None if state.served_by is None else state.served_by.name,
            state.attempts,
            state.resumptions,
            0.0 if state.admission is None else state.admission.queued_s,
            first_s - began_s if first_s else 0.0,
            now_s - began_s,
            prompt_tokens,
            cached_tokens,
            output_tokens,
            state.cache_miss,
        )
        self._uncounted.append((model, context.is_identified, entry))
        if self.tracer is not None:
            self.tracer.end(context, entry)

    def count(self, limit: int | None = None) -> None:
        """Count the oldest requests that are not counted yet, at most so many."""
        found, self._uncounted = self._uncounted[:limit], self._uncounted[limit:] if limit else []
        served, known = self.counted_metrics.served, []
        for model, is_identified, entry in found:
            served.count(model, entry)
            if is_identified:
                known.append(entry)
        self.counted_journal.extend(known)
        self._series.extend(known)
        if self.file is not None:
            self.file.extend(known)

    async def run(self) -> None:
        """Run the background work of all records, forever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.process.run())
            group.create_task(self._count_in_slices())
            group.create_task(self._sweep())
            if self.file is not None:
                group.create_task(self.file.run(self.count))

    async def _count_in_slices(self) -> None:
        """Count finished requests, forever."""
        while True:
            await self.clock.sleep(_COUNT_INTERVAL_S)
            while self._uncounted:
                self.count(max(_SLICE, len(self._uncounted) // _PART))
                await asyncio.sleep(0)

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
        self.counted_metrics.drop_gone(models.keys() | set(_NOT_OF_THE_TABLE), known)
        return replicas

    def _set_clock(self) -> None:
        self._epoch_s = self.clock.now().timestamp() - self.clock.monotonic()
