"""From the store's objects to a routing table. Pure; remembers nothing but what it is given."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import urlsplit

from gateway.routing import hardware
from gateway.routing.table import (
    DEFAULT_CONCURRENCY,
    BackendBuilder,
    CanarySplit,
    EngineEndpoint,
    HeaderRule,
    Origin,
    RoutingTable,
    ServedModel,
    WeightedBackend,
)
from schemas import duration
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, served_names
from schemas.meta import Condition, ConditionStatus, find_condition
from schemas.replica import Endpoint
from schemas.route import Backend, ModelRoute, ModelRouteSpec
from schemas.routing import Routing

# How long an engine may outlive its agent's lease and still be asked: an agent's update or an
# etcd outage is over by then, and a Mac that is gone has refused its first connection long ago.
ORPHAN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanEndpoint:
    """An engine whose endpoint vanished although its deployment goes on."""

    target: EngineEndpoint
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInputs:
    """What the store held, by name."""

    deployments: Mapping[str, ModelDeployment]
    statuses: Mapping[str, ModelDeploymentStatus]
    routes: Mapping[str, ModelRoute]
    leased: Mapping[str, EngineEndpoint]
    """By replica."""
    sites: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Nodes' labels `site`, by node; they win over what endpoints say."""


def endpoint_of(endpoint: Endpoint, version: int) -> EngineEndpoint | None:
    """Return whom to ask; None if the address is none that a gateway can connect to."""
    url = urlsplit(endpoint.spec.url)
    if url.scheme != "http" or not url.hostname or url.path.strip("/"):
        return None
    try:
        port = url.port or 80
    except ValueError:
        return None
    return EngineEndpoint(
        replica=endpoint.metadata.name,
        node=endpoint.spec.node,
        deployment=endpoint.spec.deployment,
        origin=Origin(url.hostname, port),
        names=endpoint.spec.served_names,
        version=version,
        template=endpoint.spec.template,
        site=endpoint.spec.site,
        concurrency=endpoint.spec.concurrency or DEFAULT_CONCURRENCY,
        points=hardware.points(endpoint.spec.hardware),
        is_fit=hardware.is_fit(endpoint.spec.parameters, endpoint.spec.hardware),
    )


def orphans_of(
    known: Mapping[str, OrphanEndpoint],
    before: Mapping[str, EngineEndpoint],
    now: TableInputs,
    now_s: float,
) -> dict[str, OrphanEndpoint]:
    """Return the orphans after a change: `before` is who was leased until now."""
    fresh = {
        replica: OrphanEndpoint(target=target, until_s=now_s + ORPHAN_S)
        for replica, target in before.items()
    }
    return {
        replica: orphan
        for replica, orphan in {**known, **fresh}.items()
        if replica not in now.leased
        and orphan.until_s > now_s
        and _is_kept(now.deployments.get(orphan.target.deployment))
    }


def _is_kept(deployment: ModelDeployment | None) -> bool:
    return deployment is not None and deployment.metadata.deletion_timestamp is None


def build_table(
    seen: TableInputs, orphans: Iterable[EngineEndpoint], *, site: str = ""
) -> RoutingTable:
    """Return the table: routes win over deployments' own names, and those over served names.

    `site` is the gateway's own.
    """
    orphans = tuple(orphans)
    maker = _TableBuilder(seen, orphans, site)
    models = {
        name: maker.model(name, (maker.share(deployments),))
        for name, deployments in _served(seen.deployments).items()
    }
    # Backwards, so that of two routes for one name the first by name wins, whatever the order.
    for _, route in sorted(seen.routes.items(), reverse=True):
        models[route.spec.model] = maker.routed(route.spec)
    return RoutingTable(
        models=MappingProxyType(models), endpoints=len(seen.leased), kept=len(orphans)
    )


class _TableBuilder:
    """Makes the models of one table."""

    def __init__(self, seen: TableInputs, orphans: Iterable[EngineEndpoint], site: str) -> None:
        self._seen = seen
        self._leased = _by_deployment(seen.leased.values(), seen.sites)
        self._orphans = _by_deployment(orphans, seen.sites)
        self._shares = BackendBuilder(_canary_splits(seen.statuses), site)

    def share(
        self, deployments: Sequence[str], weight: int = 1, routing: Routing | None = None
    ) -> WeightedBackend:
        """Return a share; without a `routing` the first of its deployments says."""
        return self._shares.share(
            deployments,
            leased=[target for name in deployments for target in self._leased.get(name, ())],
            orphans=[target for name in deployments for target in self._orphans.get(name, ())],
            weight=weight,
            routing=routing or self._own_routing(deployments),
        )

    def routed(self, spec: ModelRouteSpec) -> ServedModel:
        """Return the name that a route gives."""
        fallbacks = tuple(self.share((name,), routing=spec.routing) for name in spec.fallbacks)
        rules = []
        for rule in spec.rules:
            shares = self._backends(rule.backends, spec.routing)
            ruled = self.model(spec.model, shares, fallbacks)
            headers = tuple(
                (one.name.lower().encode(), None if one.value is None else one.value.encode())
                for one in rule.headers
            )
            rules.append(
                HeaderRule(
                    headers=headers, shares=shares, reason=ruled.reason, sleepers=ruled.sleepers
                )
            )
        shares = self._backends(spec.backends, spec.routing)
        return self.model(spec.model, shares, fallbacks, tuple(rules))

    def model(
        self,
        name: str,
        shares: tuple[WeightedBackend, ...],
        fallbacks: tuple[WeightedBackend, ...] = (),
        rules: tuple[HeaderRule, ...] = (),
    ) -> ServedModel:
        """Return a name that the shares serve."""
        seen = self._seen
        some = (*shares, *fallbacks, *(share for rule in rules for share in rule.shares))
        everybody = dict.fromkeys(name for share in some for name in share.deployments)
        created = [
            int(metadata.creation_timestamp.timestamp())
            for one in everybody
            if one in seen.deployments
            and (metadata := seen.deployments[one].metadata).creation_timestamp is not None
        ]
        ttls = [
            duration.parse_fine(share.routing.sessions.ttl)
            for share in some
            if share.routing.sessions.enabled
        ]
        return ServedModel(
            name=name,
            created=min(created, default=0),
            shares=shares,
            reason=_reason(shares, fallbacks, seen),
            sleepers=tuple(_scaled_to_zero(shares, seen)),
            routing=max(shares, key=lambda share: share.weight).routing,
            rules=rules,
            fallbacks=fallbacks,
            session_s=max(ttls, default=0.0),
            is_prefix_aware=any(share.minds_prefixes for share in some),
            is_sole=len({t for share in some for t in (*share.leased, *share.orphans)}) <= 1,
        )

    def _backends(
        self, backends: Sequence[Backend], routing: Routing | None
    ) -> tuple[WeightedBackend, ...]:
        ordered = sorted(backends, key=lambda b: (b.deployment, b.weight))
        return tuple(self.share((one.deployment,), one.weight, routing) for one in ordered)

    def _own_routing(self, deployments: Sequence[str]) -> Routing:
        there = self._seen.deployments
        return next((there[one].spec.routing for one in deployments if one in there), Routing())


def _canary_splits(statuses: Mapping[str, ModelDeploymentStatus]) -> dict[str, CanarySplit]:
    """Return the new versions that get a part of the requests, or none, for they were found bad."""
    found = {}
    for name, status in statuses.items():
        canary = status.canary
        if canary is not None and canary.outcome != "Passed":
            weight = canary.weight if canary.outcome == "Running" else 0
            found[name] = CanarySplit(template=canary.template, weight=weight)
    return found


def _by_deployment(
    targets: Iterable[EngineEndpoint], sites: Mapping[str, str]
) -> dict[str, list[EngineEndpoint]]:
    found: dict[str, list[EngineEndpoint]] = {}
    for one in targets:
        site = sites.get(one.node, one.site)
        target = one if site == one.site else replace(one, site=site)
        found.setdefault(target.deployment, []).append(target)
    return found


def _served(deployments: Mapping[str, ModelDeployment]) -> dict[str, tuple[str, ...]]:
    """Return who serves each name; a deployment's own name belongs to it alone."""
    found: dict[str, list[str]] = {name: [name] for name in sorted(deployments)}
    for own, deployment in sorted(deployments.items()):
        for name in served_names(deployment)[1:]:
            if name not in deployments:
                found.setdefault(name, []).append(own)
    return {name: tuple(some) for name, some in found.items()}


def _reason(
    shares: Sequence[WeightedBackend], fallbacks: Sequence[WeightedBackend], seen: TableInputs
) -> str:
    if all(share.weight == 0 for share in (*shares, *fallbacks)):
        return "Every backend of its ModelRoute has weight 0."
    involved = dict.fromkeys(one for share in (*shares, *fallbacks) for one in share.deployments)
    return " ".join(_why_not(one, seen) for one in involved)


def _scaled_to_zero(
    shares: tuple[WeightedBackend, ...], seen: TableInputs
) -> Iterator[tuple[int, str]]:
    for share in shares:
        for name in share.deployments if share.weight else ():
            deployment = seen.deployments.get(name)
            if deployment is not None and _can_scale_to_zero(deployment):
                yield share.weight, name


def _can_scale_to_zero(deployment: ModelDeployment) -> bool:
    """Return whether autoscaling may leave it without a replica until somebody asks for one."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None or deployment.metadata.deletion_timestamp is not None:
        return False
    fewest = (autoscaling.min_replicas, *(w.min_replicas for w in autoscaling.schedule))
    return 0 in fewest


def _why_not(name: str, seen: TableInputs) -> str:
    """Return why the deployment does not answer, in the reconciler's words where there are any."""
    deployment = seen.deployments.get(name)
    if deployment is None:
        return f"ModelDeployment {name} does not exist."
    if deployment.spec.replicas == 0 and deployment.spec.autoscaling is None:
        return f"ModelDeployment {name} is scaled to 0 replicas."
    status = seen.statuses.get(name)
    told = _main_condition(status.conditions if status is not None else ())
    if told is None:
        return f"ModelDeployment {name} has no endpoint yet, and the reconciler says nothing of it."
    return f"ModelDeployment {name}: {told.reason}: {told.message or told.type}."


def _main_condition(conditions: tuple[Condition, ...]) -> Condition | None:
    """Return the condition that says most: what is refused, then what is under way, then what is."""
    found = [find_condition(conditions, type_) for type_ in ("Placed", "Progressing", "Available")]
    placed, progressing, available = found
    if placed is not None and placed.status != ConditionStatus.TRUE:
        return placed
    return progressing or available or placed
