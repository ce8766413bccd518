"""The reconciler's port: health, metrics and its own log, and what the flags add: webhooks of Git, and joins.

Load balancers read /health/live and /health/ready without credentials; the rest needs an identity of the fleet, a
ticket or a token beyond this machine (identity/metrics_access.py).
"""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import orjson
import psutil
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from identity.log_access import LogAccess, LogQuery
from identity.metrics_access import MetricsAccess
from machinery import prometheus
from machinery.clock import Clock
from machinery.http_server import AdminServer, ServerSecurity
from machinery.prometheus import Gauge, MetricFamily
from machinery.version import version
from reconciler.controller import Controller
from schemas.wire.errors import Refusal, RefusedError
from schemas.wire.health import StoreView

LOG_PATH: Final = "/v1/logs/reconciler"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerApi:
    """The routes that every reconciler has."""

    controller: Controller
    access: MetricsAccess
    log: LogAccess
    clock: Clock
    started_s: float
    """The start of the process on the monotonic clock."""
    more: Sequence[MetricFamily] = ()
    """Metrics of other parts."""
    process: psutil.Process = field(default_factory=psutil.Process)

    def routes(self) -> list[Route]:
        """Return the routes with their paths."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/health/live", self.live, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route(LOG_PATH, self.own_log, methods=["GET"]),
        ]

    async def live(self, _: Request) -> Response:
        """Answer 200 as long as the process runs."""
        return _json({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        """Answer 200 once the state of the fleet is known, else 503. One that does not lead is ready as well."""
        is_ready = self.controller.is_synced
        status = "ok" if is_ready else "not synced: etcd was not reached yet"
        return _json({"status": status}, 200 if is_ready else 503)

    async def health(self, request: Request) -> Response:
        """Report whether the reconciler leads, and the age of what it knows."""
        if (refused := await self._refusal(request)) is not None:
            return refused
        controller = self.controller
        body = {
            "status": "ok" if controller.is_synced else "not synced: etcd was not reached yet",
            "leader": controller.metrics.is_leader,
            "version": version(),
            "uptimeSeconds": round(self.clock.monotonic() - self.started_s, 3),
            **StoreView(controller.lag_s(), controller.refusal).fields(),
        }
        return _json(body, 200 if controller.is_synced else 503)

    async def metrics(self, request: Request) -> Response:
        """Export the metrics in the Prometheus text format."""
        if (refused := await self._refusal(request)) is not None:
            return refused
        families = (self.controller.metrics, *self.more, *self._process())
        return Response(prometheus.render(families), media_type=prometheus.CONTENT_TYPE)

    async def own_log(self, request: Request) -> Response:
        """Send the last lines of the reconciler's own log, for a ticket."""
        try:
            query = LogQuery.model_validate(dict(request.query_params))
            return await self.log.show(query, request.headers.get("authorization", ""))
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][-1])[:60]
            return _refused(Refusal(status=400, message=f"'{name}': {first['msg']}.", param=name))
        except RefusedError as error:
            return _refused(error.refusal)

    def _process(self) -> tuple[MetricFamily, ...]:
        process = self.process
        return (
            Gauge(
                "process_cpu_seconds_total",
                "CPU time, user and system.",
                lambda: sum(process.cpu_times()[:2]),
                "counter",
            ),
            Gauge(
                "process_resident_memory_bytes",
                "Memory in use.",
                lambda: process.memory_info().rss,
            ),
            Gauge("process_open_fds", "Open file descriptors.", process.num_fds),
            Gauge(
                "process_start_time_seconds",
                "Start of the process, in seconds since 1970.",
                process.create_time,
            ),
        )

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a client that may not read metrics; None if it may."""
        denial = await self.access.denial(request.scope)
        if denial is None:
            return None
        return _refused(Refusal(status=denial.status, message=denial.message, type="refused"))


def _refused(found: Refusal) -> Response:
    headers = {name.decode(): value.decode() for name, value in found.headers()}
    return Response(found.body(), found.status, headers)


def _json(body: Mapping[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


class ReconcilerServer:
    """Serves the routes on the port; other processes find the address in the reconciler's lease."""

    def __init__(self, clock: Clock, address: tuple[str, int], security: ServerSecurity) -> None:
        """`address` is host and port, 0 for any."""
        self._clock, self._address, self._security = clock, address, security
        self._server: AdminServer | None = None
        self.listening = asyncio.Event()

    @property
    def url(self) -> str:
        """The address for other processes; "" while it does not listen."""
        return "" if self._server is None else reachable_url(self._server.url)

    async def run(self, routes: Sequence[Route]) -> None:
        """Listen and serve forever."""
        app = Starlette(routes=list(routes))
        self._server = AdminServer(
            app, self._clock, self._address, self._on_change, security=self._security
        )
        await self._server.run()

    def _on_change(self) -> None:
        if self.url:
            self.listening.set()


def reachable_url(url: str) -> str:
    """Return the URL with the name of this machine in place of an address that stands for all of its own."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):  # noqa: S104 - compared with, not listened on
        return url
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"
