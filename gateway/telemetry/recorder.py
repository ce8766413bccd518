"""Recorder: writes each finished request to journal, metrics, time series and trace.

The cost of a request must not depend on earlier ones.
"""

import asyncio
from typing import Any, Protocol, TypeAlias

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
# A slice takes about half a millisecond.
_COUNT_INTERVAL_S, _SLICE = 0.1, 100
# Enough for a UUID or a URL.
_LONGEST_NAME = 200
_TRACE_PARENT = wire_headers.TRACE_PARENT.encode()
_NOT_OF_THE_TABLE = ("", "unknown")


Note: TypeAlias = tuple[Any, ...]
"""A finished request as its figures were found: a plain tuple, which costs the request the least."""


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


class RequestRecorder:
    """Records all requests of one gateway.

    A finished request leaves a note, which is counted within a tenth of a second, in slices between other work.
    Whoever reads what is recorded reads it here, and gets all of it.
    """

    def __init__(
        self,
        *,
        table_cache: TableCache,
        metrics: GatewayMetrics,
        clock: Clock,
        journal: RequestJournal,
        process: ProcessMetrics,
        file: JournalWriter | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.process = process
        self.tracer = tracer
        self.file = file
        self.since_s = clock.now().timestamp()
        """Start of the gateway, in seconds since 1970."""
        self._table_cache = table_cache
        self._clock = clock
        self._metrics = metrics
        self._journal = journal
        self._series = RateSeries()
        self._notes: list[Note] = []
        self._epoch_s = 0.0
        """The zero of the monotonic clock, in seconds since 1970."""
        self._set_clock()

    @property
    def metrics(self) -> GatewayMetrics:
        """The metrics, with all finished requests."""
        self._count_notes(len(self._notes))
        return self._metrics

    @property
    def journal(self) -> RequestJournal:
        """The journal, with all finished requests."""
        self._count_notes(len(self._notes))
        return self._journal

    @property
    def series(self) -> RateSeries:
        """The time series, with all finished requests."""
        self._count_notes(len(self._notes))
        return self._series

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
        state, request, http_request = context.retry_state, context.request, context.http_request
        response, principal, model_state = (
            context.response,
            context.principal,
            state.terms.model_state,
        )
        now_s = self._clock.monotonic()
        note = (
            context.began_s or now_s,
            http_request.request_id,
            http_request.path,
            context.model,
            None if request is None else request.model,
            "" if principal is None else principal.name,
            "" if request is None else request.session,
            response.is_streamed,
            response.status,
            context.outcome,
            "" if model_state is None else model_state.routing.strategy,
            state.served_by,
            state.attempts,
            state.resumptions,
            state.queued_s,
            context.first_s,
            now_s,
            state.usage,
            context.is_identified,
        )
        if self.tracer is None:
            self._notes.append(note)
        else:
            self.tracer.end(context, self._count_note(note))

    def _count_notes(self, count: int) -> None:
        """Count the oldest notes."""
        notes, self._notes = self._notes[:count], self._notes[count:]
        for note in notes:
            self._count_note(note)

    def _count_note(self, note: Note) -> JournalEntry:
        """Count one finished request."""
        began_s, id_, path, model, name, key, session, *same = note[:12]
        attempts, resumptions, queued_s, first_s, now_s, usage, is_identified = note[12:]
        entry = JournalEntry(
            self._epoch_s + began_s,
            id_,
            path,
            model if name is None or name == model else truncate(name),
            key,
            _session_label(session) if session else "",
            *same,
            attempts,
            resumptions,
            queued_s,
            first_s - began_s if first_s else 0.0,
            now_s - began_s,
            *usage,
        )
        self._count(model, entry)
        if is_identified:
            self._journal.add(entry)
            self._series.add(entry)
            if self.file is not None:
                self.file.add(entry)
        return entry

    def _count(self, model: str, entry: JournalEntry) -> None:
        endpoint = entry.served_by
        metrics = self._metrics.served.of(model, endpoint.replica if endpoint is not None else "")
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
            group.create_task(self._count_in_slices())
            group.create_task(self._sweep())
            if self.file is not None:
                group.create_task(self.file.run())

    async def _count_in_slices(self) -> None:
        """Count what was noted, forever; the last notes at the end."""
        try:
            while True:
                await self._clock.sleep(_COUNT_INTERVAL_S)
                while self._notes:
                    self._count_notes(_SLICE)
                    await asyncio.sleep(0)
        finally:
            self._count_notes(len(self._notes))

    async def _sweep(self) -> None:
        """Follow changes of the wall clock, and drop the metrics of models and replicas that are gone."""
        gone_before: frozenset[str] = frozenset()
        while True:
            await self._clock.sleep(_SWEEP_INTERVAL_S)
            self._set_clock()
            gone_before = self.sweep(gone_before)

    def sweep(self, seen_before: frozenset[str]) -> frozenset[str]:
        """Drop metrics of replicas that are neither known now nor were at the last sweep; return the known ones."""
        models = self._table_cache.table.models
        replicas = frozenset(
            endpoint.replica
            for model in models.values()
            for backend in model.backends
            for endpoint in (*backend.leased, *backend.orphans)
        )
        # A replica that ended with requests in flight is counted once more.
        known = replicas | seen_before | frozenset(_NOT_OF_THE_TABLE)
        self._metrics.drop_gone(models.keys() | set(_NOT_OF_THE_TABLE), known)
        return replicas

    def _set_clock(self) -> None:
        self._epoch_s = self._clock.now().timestamp() - self._clock.monotonic()


def _session_label(session: str) -> str:
    """Return the session for the journal; a long name is replaced by its digest."""
    return session if len(session) <= _LONGEST_NAME else session_digest(session)
