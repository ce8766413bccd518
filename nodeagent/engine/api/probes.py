"""What is asked about the engine itself: is it alive, does it serve, what does it do, what has it cached.

No request for the model comes by here, and every answer is made of figures that are there already.
"""

import os
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from machinery.exposition import CONTENT_TYPE
from nodeagent.engine import footprint
from nodeagent.engine.api import web
from nodeagent.engine.cache.options import BLOCK
from nodeagent.engine.service import Service
from nodeagent.engine.state import State


@dataclass(frozen=True, slots=True)
class Probes:
    """One method a route."""

    service: Service

    def routes(self) -> list[Route]:
        """Return them with their paths."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/cache", self.cache, methods=["GET"]),
        ]

    async def health(self, _: Request) -> Response:
        """Say how the process and its worker are; 200 only if it takes requests.

        `progress` grows for as long as the worker gets anywhere. Whoever sees it stand still while `busy` is true,
        for longer than the slowest step may take, sees a stuck worker.
        """
        service, config, gauges = self.service, self.service.config, self.service.gauges
        body = {
            "state": service.state,
            "replica": config.replica,
            "replicaUid": config.replica_uid,
            "node": config.node,
            "models": config.served_names,
            "pid": os.getpid(),
            "loadedBytes": gauges.loaded_bytes,
            "totalBytes": gauges.total_bytes,
            "steps": gauges.steps,
            "slowest_s": gauges.slowest_s,
            "rank": config.group.rank if config.group is not None else 0,
            "epoch": config.group.epoch if config.group is not None else 0,
            "progress": gauges.progress,
            "busy": service.is_busy,
            "inFlight": service.admission.in_flight,
            "queued": service.admission.queued,
            "cachedBlocks": len(gauges.prefix_blocks),
            "activeBytes": gauges.active_bytes,
            "peakBytes": footprint.peak_bytes(gauges.peak_bytes),
            "message": service.message,
        }
        return web.json_response(body, 200 if service.state is State.READY else 503)

    async def ready(self, _: Request) -> Response:
        """Say whether the model serves: 200, or the refusal that requests get.

        Raises:
            RefusedError: it does not, and why.

        """
        self.service.admit()
        return web.json_response({"ready": True, "models": self.service.config.served_names})

    async def metrics(self, _: Request) -> Response:
        """Show what was counted and measured, in Prometheus' text form."""
        service = self.service
        service.speed.look(service.clock.monotonic())
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    async def cache(self, _: Request) -> Response:
        """List what prefixes are cached, for a gateway that sends alike requests to the same replica.

        `cache/prefix.py` (summary) says how a block's name is computed from a prompt's tokens.
        """
        blocks = self.service.gauges.prefix_blocks
        return web.json_response({"block": BLOCK, "blocks": blocks})
