"""OpenTelemetry spans of a gateway's requests. Loaded only if tracing is configured.

`machinery/span_exporter.py` sends them.
"""

from dataclasses import dataclass, field

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode
from typing_extensions import override

from gateway.http.request_context import RequestContext
from gateway.telemetry.recorder import Tracer
from gateway.telemetry.request_journal import JournalEntry
from gateway.upstream import request_encoder
from machinery.span_exporter import SpanExporter, nanoseconds
from schemas.wire import gen_ai
from schemas.wire.metrics import REQUEST_ERRORS

_SUCCESS_OUTCOMES = frozenset({"answered", "abandoned", "resumed"})


@dataclass(slots=True, eq=False)
class OtelTrace(request_encoder.Trace):
    """The spans of one request until it ends."""

    tracer: api.Tracer
    span: Span
    within: Context
    """The parent context of the request's child spans."""
    attempts: list[tuple[str, Span]] = field(default_factory=list)
    """By replica, in the order of the attempts."""

    @override
    def attempt(self, replica: str, node: str) -> bytes:
        if not self.span.is_recording():
            return _lines(self.span.get_span_context())
        attributes = {"fleet.replica": replica, "fleet.node": node, "server.address": node}
        span = self.tracer.start_span("attempt", self.within, SpanKind.CLIENT, attributes)
        self.attempts.append((replica, span))
        return _lines(span.get_span_context())


class OtelTracer(Tracer):
    """Creates and ends the spans of one gateway."""

    def __init__(self) -> None:
        self._exporter = SpanExporter("gateway")
        self._tracer = self._exporter.tracer

    @override
    def begin(self, context: RequestContext, epoch_s: float) -> request_encoder.Trace:
        parent, state = request_encoder.parse_context(context.http_request)
        path = context.http_request.path
        attributes = {
            "http.request.method": "POST",
            "url.path": path,
            "fleet.request_id": context.http_request.request_id.decode("ascii"),
            gen_ai.PROVIDER: gen_ai.PROVIDER_NAME,
        }
        if operation := gen_ai.operation_of(path):
            attributes[gen_ai.OPERATION] = operation
        span = self._tracer.start_span(
            # The model becomes known when the body is read.
            gen_ai.span_name(path, ""),
            self._exporter.parent(parent, state),
            SpanKind.SERVER,
            attributes,
            start_time=nanoseconds(epoch_s + context.began_s),
        )
        return OtelTrace(self._tracer, span, api.set_span_in_context(span, Context()))

    @override
    def end(self, context: RequestContext, entry: JournalEntry) -> None:
        trace = context.retry_state.trace
        if not isinstance(trace, OtelTrace) or not trace.span.is_recording():
            return
        epoch_s = entry.time_s - context.began_s
        _end_attempts(trace, context, epoch_s)
        end_s = entry.time_s + entry.whole_s
        if entry.queued_s:
            # A request may wait more than once; the span shows the sum, from its arrival on.
            self._child(trace, "queue", entry.time_s, entry.time_s + entry.queued_s)
        if entry.first_s:
            self._child(trace, "stream", entry.time_s + entry.first_s, end_s)
        span = trace.span
        span.update_name(gen_ai.span_name(entry.path, entry.model))
        span.set_attributes(
            {
                gen_ai.REQUEST_MODEL: entry.model,
                gen_ai.INPUT_TOKENS: entry.prompt_tokens,
                gen_ai.OUTPUT_TOKENS: entry.output_tokens,
                "http.response.status_code": entry.status,
                "fleet.outcome": entry.outcome,
                "fleet.resumptions": entry.resumptions,
            }
        )
        if entry.served_by is not None:
            endpoint = entry.served_by
            span.set_attributes({"fleet.replica": endpoint.replica, "fleet.node": endpoint.node})
        if entry.outcome in REQUEST_ERRORS:
            span.set_status(Status(StatusCode.ERROR, entry.outcome))
        span.end(nanoseconds(end_s))

    @override
    def close(self) -> None:
        self._exporter.close()

    def _child(self, trace: OtelTrace, name: str, begin_s: float, end_s: float) -> None:
        span = self._tracer.start_span(name, trace.within, start_time=nanoseconds(begin_s))
        span.end(nanoseconds(end_s))


def _end_attempts(trace: OtelTrace, context: RequestContext, epoch_s: float) -> None:
    """End the span of each attempt. An attempt that is not recorded was abandoned with the request."""
    tried = list(context.retry_state.attempts)
    for replica, span in trace.attempts:
        attempt = next((attempt for attempt in tried if attempt.endpoint.replica == replica), None)
        if attempt is None:
            span.set_attribute("fleet.outcome", "abandoned")
            span.end()
            continue
        tried.remove(attempt)
        span.set_attribute("fleet.outcome", attempt.outcome)
        if context.first_s and attempt.began_s > context.first_s:
            span.update_name("resumption")
        if attempt.outcome not in _SUCCESS_OUTCOMES:
            span.set_status(Status(StatusCode.ERROR, attempt.outcome))
        span.end(nanoseconds(epoch_s + attempt.ended_s))


def _lines(context: SpanContext) -> bytes:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return request_encoder.trace_lines(
        parent.encode(), context.trace_state.to_header().encode("latin-1")
    )
