"""Routes in the shapes that older dashboards read: `/api/dashboard`, `/api/cluster`, `/queue` and `/metrics`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from dashboard.api.routes import json_response
from dashboard.seed_views import SeedViews
from gateway.admin.query_words import parse_kept_duration, parse_outcomes
from machinery.clock import Clock
from schemas.wire.errors import Refusal, RefusedError

_DAY_S: Final = 24 * 3600
_STREAM_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class SeedRoutes:
    """Handlers of the routes, one method for each."""

    views: SeedViews
    clock: Clock

    def add_to(self, router: APIRouter) -> None:
        """Register the routes."""
        for path, answer in (
            ("/api/dashboard/overview", self.overview),
            ("/api/dashboard/workers", self.workers),
            ("/api/dashboard/metrics/timeseries", self.timeseries),
            ("/api/dashboard/requests", self.requests),
            ("/api/cluster/status", self.cluster),
            ("/api/cluster/workers", self.workers),
            ("/api/cluster/workers/{name}", self.worker),
            ("/queue", self.queue),
            ("/metrics/snapshot", self.snapshot),
            ("/metrics/stream", self.stream),
        ):
            router.add_api_route(path, answer, methods=["GET"])

    async def overview(self) -> Response:
        """Return the figures of a dashboard's cards, for the whole fleet."""
        return json_response(self.views.overview())

    async def workers(self) -> Response:
        """List the Macs."""
        return json_response(self.views.workers())

    async def worker(self, name: str) -> Response:
        """Describe one Mac."""
        found = self.views.worker(name)
        if found is None:
            message = f"There is no Mac '{name[:100]}'; GET /api/cluster/workers lists them."
            raise RefusedError(Refusal(status=404, message=message, code="worker_not_found"))
        return json_response(found)

    async def timeseries(
        self,
        metric: Annotated[str, Query(max_length=60)] = "throughput",
        duration: Annotated[str, Query(max_length=20)] = "1h",
    ) -> Response:
        """Return one figure over time; null where nothing was measured."""
        return json_response(self.views.timeseries(metric, parse_kept_duration(duration)))

    async def requests(
        self,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        status: Annotated[str, Query(max_length=200)] = "",
        model: Annotated[str, Query(max_length=200)] = "",
        node: Annotated[str, Query(max_length=200)] = "",
    ) -> Response:
        """Return the last requests at all gateways, newest first. `status`: words, separated by commas."""
        return json_response(
            self.views.requests(limit, parse_outcomes(status), model=model, node=node)
        )

    async def cluster(self) -> Response:
        """Report the state of the cluster."""
        return json_response(self.views.cluster())

    async def queue(self) -> Response:
        """Report the waiting and running requests of all gateways."""
        return json_response(self.views.queue())

    async def snapshot(self) -> Response:
        """Return the figures of a small dashboard at once."""
        return json_response(self.views.snapshot())

    async def stream(self) -> Response:
        """Stream the snapshot as server-sent events, one every two seconds."""
        return StreamingResponse(
            self._snapshots(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _snapshots(self) -> AsyncIterator[bytes]:
        while True:
            yield b"data: %s\n\n" % orjson.dumps(self.views.snapshot())
            await self.clock.sleep(_STREAM_S)
