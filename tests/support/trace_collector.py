"""A collector of OpenTelemetry traces, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """The requests that an OpenTelemetry collector would get."""

    url: str
    spans: list[Span] = field(default_factory=list)
    services: dict[str, dict[str, str]] = field(default_factory=dict)
    """Attributes of the resources, by service."""
    tokens: set[str] = field(default_factory=set)
    """The `authorization` of the requests."""
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """The end of its hang."""
    posts: int = 0

    def of(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> dict[str, Span]:
        """Return the children of a span by name."""
        return {s.name: s for s in self.spans if s.parent_span_id == parent.span_id}

    async def take(self, request: web.Request) -> web.Response:
        self.posts += 1
        await self.goes_on.wait()
        self.tokens.add(request.headers.get("authorization", ""))
        from_string = ExportTraceServiceRequest.FromString(await request.read())
        for resource in from_string.resource_spans:
            told = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services[told["service.name"]] = told
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response()


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector("")
    collector.goes_on.set()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.goes_on.set()
        await runner.cleanup()


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove this machine's OpenTelemetry environment, and send batches at once."""
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("TRACES_EXPORTER", "TRACES_SAMPLER", "SERVICE_NAME", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def strings(span: Span) -> dict[str, str]:
    """Return the attributes of a span that are texts."""
    return {attribute.key: attribute.value.string_value for attribute in span.attributes}


def integers(span: Span) -> dict[str, int]:
    """Return the attributes of a span that are whole numbers."""
    return {
        attribute.key: attribute.value.int_value
        for attribute in span.attributes
        if attribute.value.HasField("int_value")
    }
