"""A fleet for Prometheus: the processes to scrape, and metrics of what only the store knows. Pure functions of caches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from insight import fleet_views
from insight.fleet_caches import FleetCaches
from machinery.prometheus import family_header, format_labels
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
        yield from self._leader()
        yield from self._processes()
        yield from self._conditions()
        yield from self._deployments()
        yield from self._epochs()

    def _leader(self) -> Iterator[str]:
        yield from _family("fleet_reconciler_leads", "Whether a reconciler leads.")
        yield f"fleet_reconciler_leads {int(any(self.caches.leader.items.values()))}"

    def _processes(self) -> Iterator[str]:
        name = "fleet_process_info"
        yield from _family(name, "1 for each process that is registered, with its release.")
        for process, id_, release in sorted(self._releases()):
            labels = format_labels(("process", "id", "release"), (process, id_, release))
            yield f"{name}{labels} 1"

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

    def _conditions(self) -> Iterator[str]:
        name = "fleet_condition"
        help_ = "1 for each condition of each object; status is its present value."
        yield from _family(name, help_)
        names = ("kind", "name", "type", "status", "reason")
        for row in fleet_views.all_conditions(self.caches):
            labels = (row["kind"], row["object"], row["type"], row["status"], row["reason"])
            yield f"{name}{format_labels(names, tuple(map(str, labels)))} 1"

    def _deployments(self) -> Iterator[str]:
        rows = fleet_views.rows(self.caches, "models")
        for column, name, help_ in (
            ("desired", "fleet_deployment_replicas_desired", "Replicas that should be ready."),
            ("ready", "fleet_deployment_replicas_ready", "Replicas that are ready."),
        ):
            yield from _family(name, help_)
            for row in rows:
                if isinstance(number := row[column], int):
                    labels = format_labels(("deployment",), (str(row["name"]),))
                    yield f"{name}{labels} {number}"

    def _epochs(self) -> Iterator[str]:
        name = "fleet_replica_epoch"
        yield from _family(name, "How often the Macs of a sharded replica have formed a group.")
        for _, api_object in sorted(self.caches.objects.specs.items.items()):
            if isinstance(api_object, Replica) and api_object.spec.formation is not None:
                epoch = api_object.spec.formation.epoch
                yield f"{name}{format_labels(('replica',), (api_object.name,))} {epoch}"


def _family(name: str, help_: str) -> tuple[str, str]:
    return family_header(name, help_, "gauge")
