"""A fleet for Prometheus: the processes to scrape, and metrics of what only the store knows. Pure functions of caches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from insight import fleet_views
from insight.conditions import all_conditions
from insight.fleet_caches import FleetCaches
from machinery.prometheus import Gauge, MetricFamily
from schemas.node import NodeStatus
from schemas.replica import Replica
from store import keys

Target = dict[str, list[str] | dict[str, str]]
"""One entry of Prometheus' HTTP service discovery: `targets` (HOST:PORT) and `labels`.

https://prometheus.io/docs/prometheus/latest/http_sd/
"""

# Clients that may write leases could write millions.
_MOST_TARGETS: Final = 20_000


def scrape_targets(caches: FleetCaches) -> list[Target]:
    """Return every process of the fleet that answers `/metrics` over TCP, in order.

    Labels: `process` (agent, engine, gateway, reconciler, dashboard), `node`, `replica`, `deployment`, and Prometheus' own
    `__scheme__`. Engines that listen on a socket are left out: their agent shows their figures.
    """
    found = (
        *_agents(caches),
        *_engines(caches),
        *_gateways(caches),
        *_reconcilers(caches),
        *_dashboards(caches),
    )
    return list(found[:_MOST_TARGETS])


def _agents(caches: FleetCaches) -> Iterator[Target]:
    objects, prefix = caches.objects, keys.NODE_LEASE_PREFIX
    for key in sorted(objects.leases.items):
        name = key.removeprefix(prefix)
        status = objects.statuses.items.get(keys.status_key("Node", name))
        if key.startswith(prefix) and isinstance(status, NodeStatus):
            yield from _target(status.agent_url, process="agent", node=name)


def _engines(caches: FleetCaches) -> Iterator[Target]:
    for _, endpoint in sorted(caches.objects.endpoints.items.items()):
        yield from _target(
            endpoint.spec.url,
            process="engine",
            node=endpoint.spec.node,
            replica=endpoint.name,
            deployment=endpoint.spec.deployment,
        )


def _gateways(caches: FleetCaches) -> Iterator[Target]:
    for key, lease in sorted(caches.gateways.items.items()):
        id_ = key.removeprefix(keys.GATEWAY_LEASE_PREFIX)
        yield from _target(lease.url, process="gateway", gateway=id_)


def _reconcilers(caches: FleetCaches) -> Iterator[Target]:
    for key, lease in sorted(caches.reconcilers.items.items()):
        id_ = key.removeprefix(keys.RECONCILER_LEASE_PREFIX)
        yield from _target(lease.url, process="reconciler", reconciler=id_)


def _dashboards(caches: FleetCaches) -> Iterator[Target]:
    for _, lease in sorted(caches.dashboards.items.items()):
        yield from _target(lease.url, process="dashboard")


def _target(url: str, **labels: str) -> Iterator[Target]:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.netloc:
        yield {"targets": [parts.netloc], "labels": {"__scheme__": parts.scheme, **labels}}


@dataclass(frozen=True, slots=True)
class FleetMetrics:
    """Metrics of the fleet's objects, from the caches of one process."""

    caches: FleetCaches

    def lines(self) -> Iterator[str]:
        """Yield the metrics in Prometheus' text format."""
        for family in self._families():
            yield from family.lines()

    def _families(self) -> Iterator[MetricFamily]:
        caches = self.caches
        help_ = "Whether a reconciler leads."
        yield Gauge("fleet_reconciler_leads", help_, lambda: any(caches.leader.items.values()))
        releases = dict.fromkeys(self._releases(), 1)
        help_ = "1 for each process that is registered, with its release."
        yield _gauge("fleet_process_info", help_, ("process", "id", "release"), releases)
        conditions = {
            (kind, name, found.type, found.status.value, found.reason): 1
            for kind, name, found in all_conditions(caches)
        }
        help_ = "1 for each condition of each object; status is its present value."
        labels = ("kind", "name", "type", "status", "reason")
        yield _gauge("fleet_condition", help_, labels, conditions)
        rows = fleet_views.rows(caches, "models")
        for column, name, help_ in (
            ("desired", "fleet_deployment_replicas_desired", "Replicas that should be ready."),
            ("ready", "fleet_deployment_replicas_ready", "Replicas that are ready."),
        ):
            numbers = {
                (str(row["name"]),): number
                for row in rows
                if isinstance(number := row[column], int)
            }
            yield _gauge(name, help_, ("deployment",), numbers)
        epochs = {
            (item.name,): item.spec.formation.epoch
            for item in caches.objects.specs.items.values()
            if isinstance(item, Replica) and item.spec.formation is not None
        }
        help_ = "How often the Macs of a sharded replica have formed a group."
        yield _gauge("fleet_replica_epoch", help_, ("replica",), epochs)

    def _releases(self) -> Iterator[tuple[str, str, str]]:
        caches = self.caches
        for key, gateway in caches.gateways.items.items():
            yield "gateway", key.removeprefix(keys.GATEWAY_LEASE_PREFIX), gateway.version
        for key, dashboard in caches.dashboards.items.items():
            yield "dashboard", key.removeprefix(keys.DASHBOARD_LEASE_PREFIX), dashboard.version
        for key in caches.objects.leases.items:
            if key.startswith(keys.NODE_LEASE_PREFIX):
                node = key.removeprefix(keys.NODE_LEASE_PREFIX)
                status = caches.objects.statuses.items.get(keys.status_key("Node", node))
                if isinstance(status, NodeStatus):
                    yield "agent", node, status.agent_version


def _gauge(name: str, help_: str, labels: Sequence[str], numbers: Mapping[Any, float]) -> Gauge:
    return Gauge(name, help_, lambda: numbers, labels=labels)
