"""OpenTelemetry traces over OTLP/HTTP. The only user of its SDK; loaded only if tracing is configured.

The SDK reads the standard environment (endpoint, headers, sampler, resource, batches) itself. Its
thread sends spans from a bounded queue: a failing collector loses spans but never delays a request.
"""

import threading
from dataclasses import dataclass, field

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from gateway.http.request_context import RequestContext
from gateway.telemetry.recorder import Tracer
from gateway.telemetry.request_journal import JournalEntry
from gateway.upstream import request_encoder
from machinery.version import version
from schemas.wire.metrics import REQUEST_ERRORS

_SUCCESS_OUTCOMES = frozenset({"answered", "abandoned", "resumed"})
# Time for the last batch when the process ends.
_FLUSH_S = 2.0
_NS = 1_000_000_000
_SHUTDOWN_S = 0.5


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
        attributes = {"fleet.replica": replica, "fleet.node": node}
        span = self.tracer.start_span("attempt", self.within, SpanKind.CLIENT, attributes)
        self.attempts.append((replica, span))
        return _lines(span.get_span_context())


class OtelTracer(Tracer):
    """Creates and ends the spans of one gateway."""

    def __init__(self) -> None:
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "fleet-gateway"}))
        self._exporter = OTLPSpanExporter()
        self._processor = BatchSpanProcessor(self._exporter)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("mlx-fleet.gateway", version())
        self._propagator = TraceContextTextMapPropagator()

    @override
    def begin(self, context: RequestContext, epoch_s: float) -> request_encoder.Trace:
        parent, state = request_encoder.parse_context(context.http_request.headers)
        within = Context()
        if parent:
            carrier = {"traceparent": parent.decode("ascii"), "tracestate": state.decode("ascii")}
            within = self._propagator.extract(carrier, within)
        path = context.http_request.path
        attributes = {
            "http.request.method": "POST",
            "url.path": path,
            "fleet.request_id": context.http_request.request_id.decode("ascii"),
        }
        span = self._tracer.start_span(
            f"POST {path}",
            within,
            SpanKind.SERVER,
            attributes,
            start_time=_ns(epoch_s + context.began_s),
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
        span.set_attributes(
            {
                "gen_ai.request.model": entry.model,
                "gen_ai.usage.input_tokens": entry.prompt_tokens,
                "gen_ai.usage.output_tokens": entry.output_tokens,
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
        span.end(_ns(end_s))

    @override
    def close(self) -> None:
        """Send the remaining spans, for two seconds at most. Blocks."""
        # In a daemon thread, because the SDK's own limit is 30 s.
        last = threading.Thread(target=self._processor.shutdown, daemon=True)
        last.start()
        last.join(_FLUSH_S)
        if last.is_alive():
            # Otherwise it would retry for a minute.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the library leaves it so
            last.join(_SHUTDOWN_S)

    def _child(self, trace: OtelTrace, name: str, begin_s: float, end_s: float) -> None:
        span = self._tracer.start_span(name, trace.within, start_time=_ns(begin_s))
        span.end(_ns(end_s))


def _end_attempts(trace: OtelTrace, context: RequestContext, epoch_s: float) -> None:
    """End the span of each attempt. An attempt that is not recorded was abandoned with the request."""
    tried = list(context.retry_state.attempts)
    for replica, span in trace.attempts:
        found = next((one for one in tried if one.endpoint.replica == replica), None)
        if found is None:
            span.set_attribute("fleet.outcome", "abandoned")
            span.end()
            continue
        tried.remove(found)
        span.set_attribute("fleet.outcome", found.outcome)
        if context.first_s and found.began_s > context.first_s:
            span.update_name("resumption")
        if found.outcome not in _SUCCESS_OUTCOMES:
            span.set_status(Status(StatusCode.ERROR, found.outcome))
        span.end(_ns(epoch_s + found.ended_s))


def _lines(context: SpanContext) -> bytes:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return request_encoder.trace_lines(
        parent.encode(), context.trace_state.to_header().encode("latin-1")
    )


def _ns(seconds: float) -> int:
    return int(seconds * _NS)
