"""Writes down each request to a model when it ends: journal, metrics, series, trace. Changes none.

This runs once a request: nothing here may look at what others have asked before.
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

_SWEEP_S = 60.0
# Such as a UUID, or a URL.
_LONGEST_NAME = 200
_NOT_OF_THE_TABLE = ("", "unknown")


class Tracer(Protocol):
    """Who records traces."""

    def begin(self, visit: RequestContext, time_s: float) -> Trace:
        """Begin a request's trace, or go on with the client's."""
        ...

    def end(self, visit: RequestContext, entry: JournalEntry) -> None:
        """End it, and tell what became of the request."""
        ...

    def close(self) -> None:
        """Have done with it all; may take a moment."""
        ...


@dataclass(slots=True, kw_only=True)
class RequestRecorder:
    """Everything that is told of requests."""

    keeper: TableCache
    metrics: GatewayMetrics
    clock: Clock
    journal: RequestJournal
    process: ProcessMetrics
    file: JournalWriter | None = None
    tracer: Tracer | None = None
    series: RateSeries = field(default_factory=RateSeries)
    since_s: float = 0.0
    """When the gateway started, since 1970."""
    _epoch_s: float = 0.0
    """When the monotonic clock showed 0, since 1970."""

    def __post_init__(self) -> None:
        self._set_clock()
        self.since_s = self.clock.now().timestamp()

    def begin(self, visit: RequestContext) -> None:
        """Take up the client's trace."""
        if self.tracer is not None:
            visit.trail.trace = self.tracer.begin(visit, self._epoch_s)
            return
        parent, state = request_encoder.parse_context(visit.heard.headers)
        if parent:
            visit.trail.trace = request_encoder.PassthroughTrace(
                request_encoder.trace_lines(parent, state)
            )

    def ended(self, visit: RequestContext) -> None:
        """Write down a request that is over."""
        trail, target = visit.trail, visit.trail.served_by
        now_s = self.clock.monotonic()
        began_s = visit.began_s or now_s
        ask, holder, model = visit.ask, visit.holder, visit.model
        entry = JournalEntry(
            self._epoch_s + began_s,
            visit.heard.request_id,
            visit.heard.path,
            model if ask is None or model == ask.model else truncate(ask.model),
            holder.name if holder is not None else "",
            _session_label(ask.session) if ask is not None and ask.session else "",
            visit.reply.is_streamed,
            visit.reply.status,
            visit.outcome,
            trail.named.routing.strategy if trail.named is not None else "",
            target,
            trail.tried,
            trail.resumptions,
            trail.queued_s,
            visit.first_s - began_s if visit.first_s else 0.0,
            now_s - began_s,
            trail.prompt_tokens,
            trail.cached_tokens,
            trail.output_tokens,
        )
        self.journal.add(entry)
        self.series.add(entry)
        self._count(model, entry)
        if self.file is not None:
            self.file.add(entry)
        if self.tracer is not None:
            self.tracer.end(visit, entry)

    def _count(self, model: str, entry: JournalEntry) -> None:
        target = entry.served_by
        figures = self.metrics.served.of(model, target.replica if target is not None else "")
        figures.ended(entry.outcome, entry.whole_s)
        if entry.queued_s:
            figures.queue.observe(entry.queued_s)
        else:
            figures.queue.counts[0] += 1
        if entry.first_s:
            figures.first_token.observe(entry.first_s)
            if entry.output_tokens > 1 and entry.outcome == "ok":
                spent_s = entry.whole_s - entry.first_s
                figures.per_token.observe(spent_s / (entry.output_tokens - 1))
        if entry.prompt_tokens:
            figures.prompt.count += entry.prompt_tokens
            figures.cached.count += entry.cached_tokens
        figures.output.count += entry.output_tokens

    async def keep(self) -> None:
        """Do what is done beside requests, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.process.keep())
            group.create_task(self._sweep())
            if self.file is not None:
                group.create_task(self.file.run())

    async def _sweep(self) -> None:
        """Follow the wall clock, and forget models and replicas that are gone."""
        gone_before: frozenset[str] = frozenset()
        while True:
            await self.clock.sleep(_SWEEP_S)
            self._set_clock()
            gone_before = self.sweep(gone_before)

    def sweep(self, seen_before: frozenset[str]) -> frozenset[str]:
        """Drop the figures of who is neither here nor was at the last sweep; return who is here."""
        models = self.keeper.table.models
        replicas = frozenset(
            target.replica
            for model in models.values()
            for share in model.shares
            for target in (*share.leased, *share.orphans)
        )
        # A replica that ended with requests under way is still to be counted once more.
        known = replicas | seen_before | frozenset(_NOT_OF_THE_TABLE)
        self.metrics.drop_gone(models.keys() | set(_NOT_OF_THE_TABLE), known)
        return replicas

    def _set_clock(self) -> None:
        self._epoch_s = self.clock.now().timestamp() - self.clock.monotonic()


def _session_label(session: str) -> str:
    """Return what the journal keeps: clients may call a conversation by megabytes."""
    return session if len(session) <= _LONGEST_NAME else session_digest(session)
