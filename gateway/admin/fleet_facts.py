"""Facts of one gateway about the fleet and its requests, for `compat.routes`.

A gateway sees requests and leases. Values that only a Mac itself can measure (CPU and GPU load,
memory in use, uptime) are null; docs/reference/http-api.md lists them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from compat.shapes import Worker
from gateway.admin.admin_context import AdminContext, NodeList, endpoints_of, queue_counts
from gateway.routing.table import EndpointHealth, EngineEndpoint
from gateway.telemetry.request_journal import render_entries
from gateway.telemetry.time_series import SERIES_METRICS, IntervalSums
from schemas.wire.engine_address import EngineAddress
from schemas.wire.requests import EndedRequest

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    """The facts of one gateway."""

    context: AdminContext
    figures = SERIES_METRICS

    def uptime_s(self) -> float:
        """Return the seconds since the gateway started."""
        return self.context.uptime_s()

    async def workers(self) -> list[Worker]:
        """Return every Mac, by name."""
        context, nodes = self.context, await self.context.nodes.nodes()
        leases: dict[EngineEndpoint, bool] = {}
        names: dict[str, set[str]] = {}
        by_node: dict[str, list[EngineEndpoint]] = {
            name: [] for name in (*nodes.statuses, *nodes.alive)
        }
        for model in context.fleet_state.table_cache.table.models.values():
            for endpoint, is_leased in endpoints_of(model):
                if endpoint not in leases:
                    by_node.setdefault(endpoint.node, []).append(endpoint)
                leases[endpoint] = is_leased
                names.setdefault(endpoint.replica, set()).add(model.name)
        served = context.recorder.metrics.served.by_replica()
        health = context.load_tracker.health(context.clock.monotonic())

        def worker(name: str, endpoints: list[EngineEndpoint]) -> Worker:
            report = nodes.statuses.get(name)
            status, why = _status(name, endpoints, nodes, leases, health)
            handled = [served.get(endpoint.replica, (0, 0.0)) for endpoint in endpoints]
            # The engines' host, if there is one: they may listen on sockets.
            host = endpoints[0].origin.host or None if endpoints else None
            return Worker(
                name=name,
                status=status,
                report=report,
                hostname=None if report is None else report.hostname,
                address=host if report is None else report.address,
                models=sorted(set[str]().union(*(names[one.replica] for one in endpoints))),
                active=sum(_active(endpoint.origin, health) for endpoint in endpoints),
                handled=sum(requests for requests, _ in handled),
                whole_s=sum(seconds for _, seconds in handled),
                details={
                    "statusReason": why or None,
                    "endpoints": [
                        {
                            "replica": endpoint.replica,
                            "deployment": endpoint.deployment,
                            "url": endpoint.origin.url,
                            "site": endpoint.site or None,
                            "hasLease": leases[endpoint],
                            "isEjected": endpoint.origin in health.ejected,
                            "activeRequests": _active(endpoint.origin, health),
                            "concurrency": endpoint.concurrency,
                        }
                        for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.replica)
                    ],
                },
            )

        return [worker(name, by_node[name]) for name in sorted(by_node)]

    def over(self, seconds: float) -> IntervalSums:
        """Return the sums over the last seconds."""
        return self.context.over(seconds)

    def points(self, seconds: int, most: int) -> Iterable[tuple[int, IntervalSums | None]]:
        """Yield the begin and the sums of each interval; None before the gateway's start."""
        recorder, now_s = self.context.recorder, self.context.clock.now().timestamp()
        for at_s, sums in recorder.series.points(now_s, seconds, most):
            yield at_s, sums.since(at_s, recorder.since_s)

    def fastest(self) -> float:
        """Return the most tokens per second in the last day."""
        return self.context.recorder.series.fastest(self.context.clock.now().timestamp())

    def ended(
        self, limit: int, outcomes: frozenset[str], model: str = "", node: str = ""
    ) -> list[EndedRequest]:
        """Return the last requests, newest first."""
        journal = self.context.recorder.journal
        entries = journal.last(limit, outcomes=outcomes, model=model, node=node)
        return render_entries(entries, self.context.id)

    def ready_models(self) -> list[str]:
        """Return the names of the models that have a ready replica."""
        models = self.context.fleet_state.table_cache.table.models.values()
        return sorted(model.name for model in models if model.ready())

    def active(self) -> int:
        """Return the number of requests at engines."""
        return self.context.load_tracker.total()

    def waiting(self) -> dict[str, int]:
        """Return the number of waiting requests by model."""
        return self.context.waiting()

    def queue_details(self) -> Json:
        """Return the requests at engines by deployment."""
        return {"activeByDeployment": queue_counts(self.context)["activeByDeployment"]}

    def cluster_details(self, workers: Sequence[Worker]) -> Json:
        """Return the health of the fleet, the source and age of the state, and the endpoints."""
        table_cache = self.context.fleet_state.table_cache
        staleness_s = table_cache.staleness_s()
        is_well = all(mac.status == "online" for mac in workers) and not table_cache.is_stale
        health = "healthy" if is_well else "degraded"
        return {
            "status": health if table_cache.is_synced else "unknown",
            "store": {
                "source": table_cache.source,
                "isStale": table_cache.is_stale,
                "stalenessSeconds": None if staleness_s is None else round(staleness_s, 3),
            },
            "endpoints": table_cache.table.endpoints,
            "endpointsKept": table_cache.table.kept,
        }


def _status(
    name: str,
    endpoints: list[EngineEndpoint],
    nodes: NodeList,
    leases: Mapping[EngineEndpoint, bool],
    health: EndpointHealth,
) -> tuple[str, str]:
    """Return the status of a Mac, and the reason if it is not online."""
    if nodes.error and name not in nodes.alive:
        # The agent's lease is unknown, so the leases of its engines decide.
        is_there = any(leases[endpoint] for endpoint in endpoints)
    else:
        is_there = name in nodes.alive
    failing = [one.replica for one in endpoints if one.origin in health.ejected]
    if not is_there:
        if not endpoints:
            return "offline", "its agent does not renew its lease"
        return "degraded", "its agent does not renew its lease; its engines may still answer"
    if failing:
        return "degraded", f"failed requests a moment ago: {', '.join(sorted(failing))}"
    return "online", ""


def _active(origin: EngineAddress, health: EndpointHealth) -> int:
    """Return the requests at an engine: this gateway's, and those that the engine reported of others."""
    return health.in_flight.get(origin, 0) + round(health.others_in_flight.get(origin, 0.0))
