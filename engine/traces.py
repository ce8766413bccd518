"""OpenTelemetry spans of an engine's requests. Loaded only if tracing is configured.

A request is one span (`chat MODEL`) below the gateway's attempt, with the children queue, prefill and decode. They are
made when the request has ended, of the times that its record has anyway.
"""

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from typing_extensions import override

from engine.admission import Ticket
from engine.request_log import RequestRecord, SpanRecorder
from machinery.span_exporter import SpanExporter, nanoseconds
from schemas.wire import gen_ai

# Outcomes that the client did not cause.
_ERRORS = frozenset({"error", "unavailable", "queue_full", "deadline"})


class RequestSpans(SpanRecorder):
    """Makes the spans of one engine."""

    def __init__(self, *, node: str, replica: str) -> None:
        where = {"fleet.node": node, "fleet.replica": replica, "service.instance.id": replica}
        self._exporter = SpanExporter("engine", where)

    @override
    def record(self, record: RequestRecord, *, ended_s: float, epoch_s: float) -> None:
        if not record.is_generation:
            return
        span = self._exporter.tracer.start_span(
            gen_ai.span_name(record.endpoint, record.model),
            self._exporter.parent(record.trace_parent, record.trace_state),
            SpanKind.SERVER,
            start_time=nanoseconds(epoch_s + record.begun_s),
        )
        if span.is_recording():
            outcome = record.outcome()
            span.set_attributes(
                {
                    "http.request.method": "POST",
                    "url.path": record.endpoint,
                    "http.response.status_code": record.status,
                    "fleet.request_id": record.id,
                    "fleet.outcome": outcome,
                    gen_ai.PROVIDER: gen_ai.PROVIDER_NAME,
                }
            )
            if operation := gen_ai.operation_of(record.endpoint):
                span.set_attribute(gen_ai.OPERATION, operation)
            if outcome in _ERRORS:
                span.set_status(Status(StatusCode.ERROR, outcome))
            if record.ticket is not None:
                self._record_phases(record, record.ticket, span, ended_s, epoch_s)
        span.end(nanoseconds(epoch_s + ended_s))

    def _record_phases(
        self,
        record: RequestRecord,
        ticket: Ticket,
        span: api.Span,
        ended_s: float,
        epoch_s: float,
    ) -> None:
        """Add the tokens of a request, and a child for each phase that it reached; the last one ends with it."""
        span.set_attributes(
            {
                gen_ai.REQUEST_MODEL: record.model,
                gen_ai.INPUT_TOKENS: ticket.prompt_tokens,
                gen_ai.CACHED_TOKENS: ticket.cached_tokens,
                gen_ai.OUTPUT_TOKENS: ticket.completion_tokens,
                gen_ai.FINISH_REASONS: (record.finished_reason(),),
            }
        )
        if not ticket.jobs:
            return
        within = api.set_span_in_context(span, Context())
        starts = (
            ("queue", ticket.entered_s),
            ("prefill", ticket.started_s),
            # Embeddings have no tokens.
            ("decode", ticket.first_s if ticket.completion_tokens else None),
        )
        reached = [(name, start_s) for name, start_s in starts if start_s is not None]
        ends = [start_s for _, start_s in reached[1:]]
        ends.append(ended_s if ticket.first_s is None else ticket.last_s)
        for (name, start_s), end_s in zip(reached, ends, strict=True):
            child = self._exporter.tracer.start_span(
                name, within, start_time=nanoseconds(epoch_s + start_s)
            )
            child.end(nanoseconds(epoch_s + end_s))

    @override
    def close(self) -> None:
        self._exporter.close()
