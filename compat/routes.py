"""Routes in the shapes of earlier dashboards: `/api/dashboard`, `/api/cluster`, `/queue` and `/metrics/snapshot`.

No route changes the fleet: `fleetctl apply` declares what runs.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from compat import shapes
from compat.shapes import Facts
from machinery.clock import Clock
from schemas import duration as durations
from schemas.wire.errors import Refusal, RefusedError, invalid
from schemas.wire.metrics import parse_outcomes

_STREAM_S: Final = 2.0
_SHORTEST_S: Final = 10
_Word = Annotated[str, Query(max_length=200)]


def make_router(facts: Facts[Any], clock: Clock | None = None) -> APIRouter:
    """Return the router of a process with these facts; with a clock, it streams its figures, too."""
    router, routes = APIRouter(), ShapeRoutes(facts, clock)
    for path, answer in (
        ("/api/cluster/status", routes.cluster),
        ("/api/cluster/workers", routes.workers),
        ("/api/cluster/workers/{name}", routes.worker),
        ("/api/dashboard/overview", routes.overview),
        ("/api/dashboard/workers", routes.workers),
        ("/api/dashboard/metrics/timeseries", routes.timeseries),
        ("/api/dashboard/requests", routes.requests),
        ("/queue", routes.queue),
        ("/metrics/snapshot", routes.snapshot),
        *((("/metrics/stream", routes.stream),) if clock is not None else ()),
    ):
        router.add_api_route(path, answer, methods=["GET"])
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    for folder in ("/api/cluster", "/api/cluster/workers/{name}"):
        for action in ("load-model", "unload-model"):
            router.add_api_route(f"{folder}/{action}", routes.refuse_action, methods=["POST"])
    return router


@dataclass(frozen=True, slots=True)
class ShapeRoutes:
    """Handlers of the routes, one method for each."""

    facts: Facts[Any]
    clock: Clock | None

    async def cluster(self) -> Response:
        """Report the state of the fleet."""
        return _json(shapes.cluster(self.facts, await self.facts.workers()))

    async def workers(self) -> Response:
        """List the Macs."""
        return _json([shapes.worker(mac) for mac in await self.facts.workers()])

    async def worker(self, name: str) -> Response:
        """Describe one Mac."""
        workers = {mac.name: mac for mac in await self.facts.workers()}
        if name not in workers:
            known = ", ".join(list(workers)[:20]) or "none"
            message = f"No worker is called '{name[:100]}'. There are: {known}."
            raise RefusedError(Refusal(status=404, message=message, code="worker_not_found"))
        return _json(shapes.worker(workers[name]))

    async def overview(self) -> Response:
        """Return the figures of a dashboard's cards."""
        return _json(shapes.overview(self.facts, await self.facts.workers()))

    async def timeseries(self, metric: _Word = "throughput", duration: _Word = "1h") -> Response:
        """Return one figure over time; null where nothing was measured."""
        return _json(shapes.timeseries(self.facts, metric, _parse_duration(duration)))

    async def requests(
        self,
        limit: Annotated[int, Query(ge=1, le=1000)] = 50,
        status: _Word = "",
        model: _Word = "",
        node: _Word = "",
    ) -> Response:
        """Return the last requests, newest first. `status`: outcomes, separated by commas."""
        ended = self.facts.ended(limit, parse_outcomes(status), model, node)
        return _json([shapes.request(request) for request in ended])

    async def queue(self) -> Response:
        """Report the waiting requests."""
        return _json(shapes.queue(self.facts))

    async def snapshot(self) -> Response:
        """Return the figures of a small dashboard at once."""
        return _json(await self._snapshot())

    async def stream(self) -> Response:
        """Stream the snapshot as server-sent events, one every two seconds."""
        return StreamingResponse(
            self._snapshots(), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def refuse_action(self) -> Response:
        """Refuse to load or unload a model by hand."""
        message = (
            "Models are not loaded or unloaded by hand here: what runs is declared. Write a "
            "ModelDeployment (spec.replicas, spec.placement) and apply it with `fleetctl apply -f`; "
            "`fleetctl delete modeldeployment/NAME` unloads. The fleet keeps it so, also after a crash."
        )
        raise RefusedError(Refusal(status=501, message=message, code="declared_not_commanded"))

    async def _snapshot(self) -> shapes.Json:
        online = shapes.count_workers(await self.facts.workers())["online"]
        return shapes.snapshot(self.facts, online)

    async def _snapshots(self) -> AsyncIterator[bytes]:
        assert self.clock is not None
        while True:
            yield b"data: %s\n\n" % orjson.dumps(await self._snapshot())
            await self.clock.sleep(_STREAM_S)


def _parse_duration(text: str) -> int:
    """Return the seconds of a duration over which figures are kept."""
    try:
        seconds = durations.parse(text)
    except ValueError as error:
        raise invalid(f"{error}.", "duration") from None
    if not _SHORTEST_S <= seconds <= shapes.DAY_S:
        message = f"'{text}' is not between {_SHORTEST_S}s and 24h, which is what is kept."
        raise invalid(message, "duration")
    return int(seconds)


def _json(body: object) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
