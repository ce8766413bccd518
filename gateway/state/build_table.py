"""Builds the routing table from the store's objects, and rebuilds the models that a change concerns. Does no I/O."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from gateway.routing.table import (
    DEFAULT_CHECKS,
    DEFAULT_CONCURRENCY,
    BackendBuilder,
    CanarySplit,
    EngineEndpoint,
    HeaderRule,
    MirrorTarget,
    RoutingTable,
    ServedModel,
    WeightedBackend,
    check_policy,
)
from gateway.state.external_endpoints import (
    ExternalBackends,
    backend_label,
    external_backends,
    is_backend_label,
)
from schemas import chips, duration
from schemas.deployment import (
    ModelDeployment,
    ModelDeploymentStatus,
    adapter_names,
    base_names,
    served_names,
)
from schemas.meta import Condition, ConditionStatus, find_condition, has_reason
from schemas.placement import SizeTierChoice, is_large_enough
from schemas.records import ExternalKey
from schemas.replica import Endpoint, EndpointHardware
from schemas.route import Backend, ModelRoute
from schemas.routing import Routing
from schemas.wire.body_limits import body_limit
from schemas.wire.engine_address import EngineAddress

# mlx-serving's formula: a priority of 100 is worth 20 points.
_POINTS_OF_PRIORITY = 1 / 5
# Reasons of the conditions Placed and Available while replicas start; all others are of deployments that cannot run.
_STARTING = frozenset({"Placing", "ReplicasStarting", "ReplicaNotReady", "Resolving"})
# A node's refusal until its agent has looked at the model's folder.
_NOT_INSPECTED = "ModelNotInspected"
# Reason of the condition Progressing after a rollout, however the replicas are now.
_COMPLETE = "RolloutComplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableInputs:
    """Objects of the store by name."""

    deployments: Mapping[str, ModelDeployment]
    statuses: Mapping[str, ModelDeploymentStatus]
    routes: Mapping[str, ModelRoute]
    leased: Mapping[str, EngineEndpoint]
    """By replica."""
    sites: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The label `site` of nodes, by node; it overrides the site of endpoints."""
    refused: AbstractSet[str] = frozenset()
    """Keys of published endpoints that are not used."""
    seen_serving: AbstractSet[str] = frozenset()
    """Deployments that had an endpoint since the gateway started, or in the saved state."""
    external_keys: Mapping[str, ExternalKey] = field(default_factory=lambda: MappingProxyType({}))
    """Keys of external servers, by name."""


def endpoint_of(published: Endpoint, version: int) -> EngineEndpoint:
    """Return the routable endpoint.

    Raises:
        ValueError: its URL is not an engine's address.

    """
    hardware = _shared(published.spec.hardware)
    # Endpoints give millions of parameters.
    parameters = published.spec.parameters * 10**6
    return EngineEndpoint(
        replica=published.metadata.name,
        node=published.spec.node,
        deployment=published.spec.deployment,
        origin=EngineAddress.parse(published.spec.url, node=published.spec.node),
        names=published.spec.served_names,
        version=version,
        template=published.spec.template,
        site=published.spec.site,
        concurrency=published.spec.concurrency or DEFAULT_CONCURRENCY,
        start_s=published.spec.start_seconds,
        points=_points(hardware),
        is_fit=_is_fit("Auto", parameters, hardware, published.spec.node),
        hardware=hardware,
        parameters=parameters,
    )


def _is_fit(tier: SizeTierChoice, parameters: int, hardware: EndpointHardware, node: str) -> bool:
    return is_large_enough(
        tier,
        parameters,
        node=node,
        chip=hardware.chip,
        gpu_cores=hardware.gpu_cores,
        memory_bytes=hardware.memory_bytes,
    )


def _points(hardware: EndpointHardware) -> float:
    return chips.machine_points(
        chip=hardware.chip, gpu_cores=hardware.gpu_cores, memory_bytes=hardware.memory_bytes
    )


@lru_cache(maxsize=1024)
def _shared(hardware: EndpointHardware) -> EndpointHardware:
    """Return one object for equal Macs: a fleet has few kinds, and many of each."""
    return hardware


def build_table(
    inputs: TableInputs, orphans: Iterable[EngineEndpoint], *, site: str = ""
) -> RoutingTable:
    """Return the table. Routes win over deployments' own names, and those win over served names.

    `site`: the gateway's own.
    """
    return TableBuilder(inputs, orphans, site=site).table()


# An endpoint before and after a change; None: there is none.
EndpointMove: TypeAlias = tuple[EngineEndpoint | None, EngineEndpoint | None]


class TableBuilder:
    """Holds the models of a table. A change of endpoints or statuses rebuilds only the models that it concerns."""

    def __init__(
        self, inputs: TableInputs, orphans: Iterable[EngineEndpoint], *, site: str = ""
    ) -> None:
        """Build all models; `site` is the gateway's own."""
        self._inputs = inputs
        self._parents = _parents(inputs.deployments)
        self._leased = _by_deployment(inputs.leased.values(), inputs)
        self._orphans = _by_deployment(orphans, inputs)
        self._canaries = dict(_canary_splits(inputs.statuses, inputs.statuses))
        self._shares = BackendBuilder(self._canaries, site)
        self._external_reasons: Mapping[str, str] = {}
        """Reasons why external endpoints of the present route are not used, by their label."""
        self._served = _served(inputs.deployments)
        # In reverse order: of two routes for one name, the first by name wins.
        routes = sorted(inputs.routes.items(), reverse=True)
        self._routes = {route.spec.model: route for _, route in routes}
        self._models: dict[str, ServedModel] = {}
        self._dependents: dict[str, set[str]] = {}
        """Names of models by the deployments that they depend on."""
        self._build(dict.fromkeys((*self._served, *self._routes)))

    def table(self) -> RoutingTable:
        """Return the table as it is now."""
        return RoutingTable(
            models=MappingProxyType(self._models.copy()),
            body_limit=_largest(model.body_limit for model in self._models.values()),
            endpoints=len(self._inputs.leased),
            kept=sum(map(len, self._orphans.values())),
            refused=len(self._inputs.refused),
        )

    def change(
        self,
        inputs: TableInputs,
        *,
        leased: Iterable[EndpointMove] = (),
        orphans: Iterable[EndpointMove] = (),
        statuses: Iterable[str] = (),
    ) -> None:
        """Go on with inputs in which only endpoints and the statuses of some deployments differ."""
        self._inputs = inputs
        stale = set(statuses)
        for name in stale:
            self._canaries.pop(name, None)
        self._canaries |= _canary_splits(inputs.statuses, stale)
        for moves, known in ((leased, self._leased), (orphans, self._orphans)):
            for before, after in moves:
                if before is not None:
                    stale.add(before.deployment)
                    known[before.deployment].pop(before.replica)
                if after is not None:
                    stale.add(after.deployment)
                    endpoints = known.setdefault(after.deployment, {})
                    endpoints[after.replica] = _declared(after, inputs)
        for name in statuses:
            for known in (self._leased, self._orphans):
                for replica, endpoint in known.get(name, {}).items():
                    known[name][replica] = _declared(endpoint, inputs)
        self._build({name for own in stale for name in self._dependents.get(own, ())})

    def _build(self, names: Iterable[str]) -> None:
        for name in names:
            route = self._routes.get(name)
            if route is not None:
                model = self.route_model(route)
            else:
                model = self.model(name, (self.backend(self._served[name], name=name),))
            self._models[name] = model
            for backend in model.all_backends():
                for own in backend.deployments:
                    self._dependents.setdefault(own, set()).add(name)

    def backend(
        self,
        deployments: Sequence[str],
        weight: int = 1,
        routing: Routing | None = None,
        name: str = "",
    ) -> WeightedBackend:
        """Return a backend. Without `routing`, the settings of the first deployment apply.

        If `name` is an adapter's, an engine that does not have the adapter yet would answer without it.
        """
        adapter = name if name in self._parents else None

        def chosen(some: _ByDeployment) -> list[EngineEndpoint]:
            found = [endpoint for own in deployments for endpoint in some.get(own, {}).values()]
            return [endpoint for endpoint in found if adapter is None or adapter in endpoint.names]

        return self._shares.backend(
            deployments,
            leased=chosen(self._leased),
            orphans=chosen(self._orphans),
            weight=weight,
            routing=routing or self._own_routing(deployments),
        )

    def route_model(self, route: ModelRoute) -> ServedModel:
        """Return the model of a route."""
        spec, outside = route.spec, external_backends(route, self._inputs.external_keys)
        self._external_reasons = {
            backend_label(name): reason for name, reason in outside.reasons.items()
        }
        fallbacks = tuple(
            self._fallback(
                name, spec.routing, {endpoint.name for endpoint in spec.external}, outside
            )
            for name in spec.fallbacks
        )
        rules = []
        for rule in spec.rules:
            backends = self._backends(rule.backends, spec.routing, outside)
            ruled = self.model(spec.model, backends, fallbacks)
            headers = tuple(
                (
                    header.name.lower().encode(),
                    None if header.value is None else header.value.encode(),
                )
                for header in rule.headers
            )
            rules.append(
                HeaderRule(
                    headers=headers,
                    backends=backends,
                    reason=ruled.reason,
                    awaited=ruled.awaited,
                    recovering=ruled.recovering,
                )
            )
        backends = self._backends(spec.backends, spec.routing, outside)
        source = "" if spec.routing is None else f"ModelRoute/{spec.model}"
        served_model = self.model(spec.model, backends, fallbacks, tuple(rules), source)
        mirror = spec.mirror
        if mirror is None or mirror.deployment not in self._inputs.deployments:
            return served_model
        target = MirrorTarget(deployment=mirror.deployment, percent=mirror.percent)
        return replace(served_model, mirror=target)

    def model(
        self,
        name: str,
        backends: tuple[WeightedBackend, ...],
        fallbacks: tuple[WeightedBackend, ...] = (),
        rules: tuple[HeaderRule, ...] = (),
        routing_source: str = "",
    ) -> ServedModel:
        """Return a model that the backends serve. `routing_source`: empty for a deployment's own routing."""
        inputs = self._inputs
        some = (*backends, *fallbacks, *(backend for rule in rules for backend in rule.backends))
        deployments_of_all = dict.fromkeys(name for backend in some for name in backend.deployments)
        created = [
            int(metadata.creation_timestamp.timestamp())
            for one in deployments_of_all
            if one in inputs.deployments
            and (metadata := inputs.deployments[one].metadata).creation_timestamp is not None
        ]
        ttls = [
            duration.parse(backend.routing.sessions.ttl)
            for backend in some
            if backend.routing.sessions.enabled
        ]
        heaviest = max(backends, key=lambda backend: backend.weight)
        endpoints = {
            endpoint for backend in some for endpoint in (*backend.leased, *backend.orphans)
        }
        return ServedModel(
            name=name,
            parent=self._parents.get(name, ""),
            created=min(created, default=0),
            backends=backends,
            reason=_reason(backends, fallbacks, inputs, self._external_reasons),
            awaited=tuple(_awaited(backends, inputs)),
            recovering=next(_recovering(backends, inputs), ""),
            routing=heaviest.routing,
            routing_source=routing_source or self._declaring_deployment(heaviest.deployments),
            rules=rules,
            fallbacks=fallbacks,
            session_s=max(ttls, default=0.0),
            is_prefix_aware=any(backend.uses_prefixes for backend in some),
            shares_cache=all(self._shares_cache(backend) for backend in some),
            context_length=self._context_length(backends),
            body_limit=self._body_limit(deployments_of_all),
            has_one_endpoint=len(endpoints) <= 1,
            start_s=max((endpoint.start_s for endpoint in endpoints), default=0.0),
        )

    def _backends(
        self, backends: Sequence[Backend], routing: Routing | None, outside: ExternalBackends
    ) -> tuple[WeightedBackend, ...]:
        ordered = sorted(backends, key=lambda b: (b.name, b.weight, b.external is not None))
        return tuple(
            self.backend((backend.name,), backend.weight, routing)
            if backend.external is None
            else self._external_backend(backend.external, routing, outside, backend.weight)
            for backend in ordered
        )

    def _fallback(
        self, name: str, routing: Routing | None, external: set[str], outside: ExternalBackends
    ) -> WeightedBackend:
        if name in external:
            return self._external_backend(name, routing, outside)
        return self.backend((name,), routing=routing)

    def _external_backend(
        self, name: str, routing: Routing | None, outside: ExternalBackends, weight: int = 1
    ) -> WeightedBackend:
        endpoint = outside.usable.get(name)
        return self._shares.backend(
            (backend_label(name),),
            leased=() if endpoint is None else (endpoint,),
            weight=weight,
            routing=routing or Routing(),
        )

    def _shares_cache(self, backend: WeightedBackend) -> bool:
        """Return whether keys share cached prompts: each deployment and the route, if any, must allow it."""
        there = self._inputs.deployments
        own = [there[name].spec.routing for name in backend.deployments if name in there]
        return all(routing.cache_sharing == "Deployment" for routing in (backend.routing, *own))

    def _context_length(self, backends: Sequence[WeightedBackend]) -> int | None:
        """Return the limit that all deployments accept: a client cannot know which one answers."""
        there = self._inputs.deployments
        names = {name for backend in backends for name in backend.deployments}
        lengths = [there[name].spec.context_length for name in names if name in there]
        return min(lengths, default=None)

    def _body_limit(self, names: Iterable[str]) -> int:
        """Return the limit of the deployment that takes the most; 0 with an external endpoint, whose limit is its own."""
        there = self._inputs.deployments
        specs = (there[name].spec if name in there else None for name in names)
        return _largest(
            0 if spec is None else body_limit(spec.context_length, spec.model.vision)
            for spec in specs
        )

    def _own_routing(self, deployments: Sequence[str]) -> Routing:
        there = self._inputs.deployments
        return next((there[name].spec.routing for name in deployments if name in there), Routing())

    def _declaring_deployment(self, deployments: Sequence[str]) -> str:
        """Return the deployment whose settings `_own_routing` returns."""
        there = self._inputs.deployments
        return next((f"ModelDeployment/{name}" for name in deployments if name in there), "")


def _largest(limits: Iterable[int]) -> int:
    """Return the largest limit; 0 if one is not known."""
    found = list(limits)
    return max(found, default=0) if all(found) else 0


def _canary_splits(
    statuses: Mapping[str, ModelDeploymentStatus], names: Iterable[str]
) -> dict[str, CanarySplit]:
    """Return the canary splits of these deployments; a rejected version gets weight 0."""
    canary_splits = {}
    for name in names:
        status = statuses.get(name)
        canary = status.canary if status is not None else None
        if canary is not None and canary.outcome != "Passed":
            weight = canary.weight if canary.outcome == "Running" else 0
            canary_splits[name] = CanarySplit(template=canary.template, weight=weight)
    return canary_splits


# Endpoints by deployment, then by replica.
_ByDeployment: TypeAlias = dict[str, dict[str, EngineEndpoint]]


def _by_deployment(endpoints: Iterable[EngineEndpoint], inputs: TableInputs) -> _ByDeployment:
    by_deployment: _ByDeployment = {}
    for endpoint in endpoints:
        by_deployment.setdefault(endpoint.deployment, {})[endpoint.replica] = _declared(
            endpoint, inputs
        )
    return by_deployment


def _declared(endpoint: EngineEndpoint, inputs: TableInputs) -> EngineEndpoint:
    """Return the endpoint with what users declare: its site, the model's size tier, its checks, its Mac's priority."""
    site = inputs.sites.get(endpoint.node, endpoint.site)
    hardware = endpoint.hardware
    deployment = inputs.deployments.get(endpoint.deployment)
    tier = "Auto" if deployment is None else deployment.spec.placement.tier
    is_fit = _is_fit(tier, endpoint.parameters, hardware, endpoint.node)
    status = inputs.statuses.get(endpoint.deployment)
    priority = 0 if status is None else status.node_priorities.get(endpoint.node, 0)
    points = _points(hardware) + priority * _POINTS_OF_PRIORITY
    checks = (
        DEFAULT_CHECKS if deployment is None else check_policy(deployment.spec.routing.health_check)
    )
    before = (endpoint.site, endpoint.is_fit, endpoint.points, endpoint.checks)
    if (site, is_fit, points, checks) == before:
        return endpoint
    return replace(endpoint, site=site, is_fit=is_fit, points=points, checks=checks)


def _served(deployments: Mapping[str, ModelDeployment]) -> dict[str, tuple[str, ...]]:
    """Return the deployments of each name. A deployment's own name belongs to it alone."""
    found: dict[str, list[str]] = {name: [name] for name in sorted(deployments)}
    for own, deployment in sorted(deployments.items()):
        for name in served_names(deployment)[1:]:
            if name not in deployments:
                found.setdefault(name, []).append(own)
    return {name: tuple(some) for name, some in found.items()}


def _parents(deployments: Mapping[str, ModelDeployment]) -> dict[str, str]:
    """Return the deployment of each adapter's name."""
    return {
        name: own
        for own, deployment in sorted(deployments.items())
        if deployment.spec.model.adapters
        for name in adapter_names(base_names(deployment), deployment.spec.model)
    }


def _reason(
    backends: Sequence[WeightedBackend],
    fallbacks: Sequence[WeightedBackend],
    inputs: TableInputs,
    external: Mapping[str, str],
) -> str:
    if all(backend.weight == 0 for backend in (*backends, *fallbacks)):
        return "Every backend of its ModelRoute has weight 0."
    involved = dict.fromkeys(
        deployment for backend in (*backends, *fallbacks) for deployment in backend.deployments
    )
    return " ".join(
        f"{external[one]}." if one in external else _why_not(one, inputs)
        for one in involved
        if one in external or not is_backend_label(one)
    )


def _awaited(backends: Sequence[WeightedBackend], inputs: TableInputs) -> Iterator[tuple[int, str]]:
    for backend in backends:
        for name in backend.deployments if backend.weight else ():
            deployment = inputs.deployments.get(name)
            if deployment is not None and (
                _can_scale_to_zero(deployment)
                or _is_starting(name, deployment, inputs)
                or has_reason(inputs.statuses.get(name), "Available", "Asleep")
            ):
                yield backend.weight, name


def _recovering(backends: tuple[WeightedBackend, ...], inputs: TableInputs) -> Iterator[str]:
    """Yield the deployments that served before, should have a replica and have no endpoint."""
    for backend in backends:
        leased = {endpoint.deployment for endpoint in backend.leased}
        for name in backend.deployments if backend.weight else ():
            deployment = inputs.deployments.get(name)
            if (
                deployment is not None
                and name in inputs.seen_serving
                and name not in leased
                and deployment.metadata.deletion_timestamp is None
                and (deployment.spec.replicas > 0 or deployment.spec.autoscaling is not None)
            ):
                yield name


def _can_scale_to_zero(deployment: ModelDeployment) -> bool:
    """Return whether autoscaling may leave the deployment without a replica."""
    autoscaling, is_gone = deployment.spec.autoscaling, deployment.metadata.deletion_timestamp
    return autoscaling is not None and is_gone is None and autoscaling.may_be_at_zero


def _is_starting(name: str, deployment: ModelDeployment, inputs: TableInputs) -> bool:
    """Return whether the first replica of a deployment is on its way, as far as the reconciler has reported."""
    is_wanted = deployment.spec.replicas > 0 or deployment.spec.autoscaling is not None
    is_gone = deployment.metadata.deletion_timestamp is not None
    if name in inputs.seen_serving or is_gone or not is_wanted:
        return False
    status = inputs.statuses.get(name)
    if status is None or any(refusal.reason == _NOT_INSPECTED for refusal in status.refusals):
        return True
    conditions = [find_condition(status.conditions, type_) for type_ in ("Placed", "Available")]
    return all(
        condition is None
        or condition.status is ConditionStatus.TRUE
        or condition.reason in _STARTING
        for condition in conditions
    )


def _why_not(name: str, inputs: TableInputs) -> str:
    """Return why the deployment does not answer, in the reconciler's words if there are any."""
    deployment = inputs.deployments.get(name)
    if deployment is None:
        return f"ModelDeployment {name} does not exist."
    if deployment.spec.replicas == 0 and deployment.spec.autoscaling is None:
        return f"ModelDeployment {name} is scaled to 0 replicas."
    status = inputs.statuses.get(name)
    if status is None or not status.conditions:
        return f"ModelDeployment {name} has no endpoint yet, and the reconciler has not reported on it."
    condition = _main_condition(status.conditions)
    if condition is None:
        return f"ModelDeployment {name}: its replicas ended a moment ago, and the reconciler has not reported why yet."
    return f"ModelDeployment {name}: {condition.reason}: {condition.message or condition.type}."


def _main_condition(conditions: tuple[Condition, ...]) -> Condition | None:
    """Return the condition that explains why there is no endpoint; None if all still say that all is well.

    First a failed placement, then what the replicas report, then a rollout in progress.
    """
    for type_ in ("Placed", "Available"):
        condition = find_condition(conditions, type_)
        if condition is not None and condition.status != ConditionStatus.TRUE:
            return condition
    progressing = find_condition(conditions, "Progressing")
    return None if progressing is None or progressing.reason == _COMPLETE else progressing
