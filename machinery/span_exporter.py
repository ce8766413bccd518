"""Export of OpenTelemetry spans over OTLP/HTTP. The only user of its SDK.

Import it only if tracing is configured (`machinery/environment.py`): that takes 90 ms and 4 MB. The SDK reads the
standard environment (endpoint, headers, sampler, resource, batches) itself. Its thread sends spans from a bounded
queue: a failing collector loses spans but never delays a request.
"""

import threading
from collections.abc import Mapping

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from machinery.version import version

# Time for the last batch when the process ends.
_FLUSH_S = 2.0
_SHUTDOWN_S = 0.5
_NS = 1_000_000_000


class SpanExporter:
    """The spans of one process, and their way to the collector."""

    def __init__(self, program: str, attributes: Mapping[str, str] | None = None) -> None:
        """`program`: the service's name unless the environment has one; `attributes`: further ones of the resource."""
        # The environment's attributes win over ours.
        resource = Resource(dict(attributes or {})).merge(Resource.create())
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: f"fleet-{program}"}))
        self._exporter = OTLPSpanExporter()
        self._processor = BatchSpanProcessor(self._exporter)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self.tracer: api.Tracer = provider.get_tracer(f"mlx-fleet.{program}", version())
        self._propagator = TraceContextTextMapPropagator()

    def parent(self, trace_parent: bytes, trace_state: bytes) -> Context:
        """Return the context of valid headers; an empty one begins a trace."""
        if not trace_parent:
            return Context()
        carrier = {
            "traceparent": trace_parent.decode("ascii"),
            "tracestate": trace_state.decode("ascii"),
        }
        return self._propagator.extract(carrier, Context())

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


def nanoseconds(epoch_s: float) -> int:
    """Return a time of a span, in the SDK's unit."""
    return int(epoch_s * _NS)
