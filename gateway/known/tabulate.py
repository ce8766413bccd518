"""From the store's objects to a routing table. Pure; remembers nothing but what it is given."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from gateway.routing.table import Model, Origin, Share, Table, Target, Trial
from schemas.deployment import ModelDeployment, ModelDeploymentStatus, served_names
from schemas.meta import Condition, Truth, find_condition
from schemas.replica import Endpoint
from schemas.route import ModelRoute

# How long an engine may outlive its agent's lease and still be asked: an agent's update or an
# etcd outage is over by then, and a Mac that is gone has refused its first connection long ago.
ORPHAN_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """An engine whose endpoint vanished although its deployment goes on."""

    target: Target
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the store held, by name."""

    deployments: Mapping[str, ModelDeployment]
    statuses: Mapping[str, ModelDeploymentStatus]
    routes: Mapping[str, ModelRoute]
    leased: Mapping[str, Target]
    """By replica."""


def target_of(endpoint: Endpoint, version: int) -> Target | None:
    """Return whom to ask; None if the address is none that a gateway can connect to."""
    url = urlsplit(endpoint.spec.url)
    if url.scheme != "http" or not url.hostname or url.path.strip("/"):
        return None
    try:
        port = url.port or 80
    except ValueError:
        return None
    return Target(
        replica=endpoint.metadata.name,
        node=endpoint.spec.node,
        deployment=endpoint.spec.deployment,
        origin=Origin(url.hostname, port),
        names=endpoint.spec.served_names,
        version=version,
        template=endpoint.spec.template,
    )


def orphans_of(
    known: Mapping[str, Orphan], before: Mapping[str, Target], now: Seen, now_s: float
) -> dict[str, Orphan]:
    """Return the orphans after a change: `before` is who was leased until now."""
    fresh = {
        replica: Orphan(target=target, until_s=now_s + ORPHAN_S)
        for replica, target in before.items()
    }
    return {
        replica: orphan
        for replica, orphan in {**known, **fresh}.items()
        if replica not in now.leased
        and orphan.until_s > now_s
        and _goes_on(now.deployments.get(orphan.target.deployment))
    }


def _goes_on(deployment: ModelDeployment | None) -> bool:
    return deployment is not None and deployment.metadata.deletion_timestamp is None


def tabulate(seen: Seen, orphans: Iterable[Target]) -> Table:
    """Return the table: routes win over deployments' own names, and those over served names."""
    leased, kept = _by_deployment(seen.leased.values()), _by_deployment(orphans)

    def share(names: tuple[str, ...], weight: int = 1) -> Share:
        return Share(
            deployments=names,
            weight=weight,
            leased=tuple(target for name in names for target in leased.get(name, ())),
            orphans=tuple(target for name in names for target in kept.get(name, ())),
        )

    models = {
        name: _model(name, (share(deployments),), seen)
        for name, deployments in _served(seen.deployments).items()
    }
    # Backwards, so that of two routes for one name the first by name wins, whatever the order.
    for _, route in sorted(seen.routes.items(), reverse=True):
        backends = sorted(route.spec.backends, key=lambda b: (b.deployment, b.weight))
        shares = tuple(share((backend.deployment,), backend.weight) for backend in backends)
        models[route.spec.model] = _model(route.spec.model, shares, seen)
    return Table(
        models=MappingProxyType(models),
        endpoints=len(seen.leased),
        trials=MappingProxyType(_trials(seen.statuses)),
    )


def _trials(statuses: Mapping[str, ModelDeploymentStatus]) -> dict[str, Trial]:
    """Return the new versions that get a part of the requests, or none, for they were found bad."""
    found = {}
    for name, status in statuses.items():
        canary = status.canary
        if canary is not None and canary.outcome != "Passed":
            weight = canary.weight if canary.outcome == "Running" else 0
            found[name] = Trial(template=canary.template, weight=weight)
    return found


def _by_deployment(targets: Iterable[Target]) -> dict[str, tuple[Target, ...]]:
    found: dict[str, list[Target]] = {}
    for target in sorted(targets, key=lambda t: (t.replica, t.origin)):
        found.setdefault(target.deployment, []).append(target)
    return {name: tuple(some) for name, some in found.items()}


def _served(deployments: Mapping[str, ModelDeployment]) -> dict[str, tuple[str, ...]]:
    """Return who serves each name; a deployment's own name belongs to it alone."""
    found: dict[str, list[str]] = {name: [name] for name in sorted(deployments)}
    for own, deployment in sorted(deployments.items()):
        for name in served_names(deployment)[1:]:
            if name not in deployments:
                found.setdefault(name, []).append(own)
    return {name: tuple(some) for name, some in found.items()}


def _model(name: str, shares: tuple[Share, ...], seen: Seen) -> Model:
    involved = [deployment for share in shares for deployment in share.deployments]
    found = [seen.deployments[one].metadata for one in involved if one in seen.deployments]
    created = [
        int(metadata.creation_timestamp.timestamp())
        for metadata in found
        if metadata.creation_timestamp is not None
    ]
    if all(share.weight == 0 for share in shares):
        reason = "Every backend of its ModelRoute has weight 0."
    else:
        reason = " ".join(_why_not(one, seen) for one in dict.fromkeys(involved))
    return Model(
        name=name,
        created=min(created, default=0),
        shares=shares,
        reason=reason,
        sleepers=tuple(_sleepers(shares, seen)),
    )


def _sleepers(shares: tuple[Share, ...], seen: Seen) -> Iterator[tuple[int, str]]:
    for share in shares:
        for name in share.deployments if share.weight else ():
            deployment = seen.deployments.get(name)
            if deployment is not None and _may_sleep(deployment):
                yield share.weight, name


def _may_sleep(deployment: ModelDeployment) -> bool:
    """Return whether autoscaling may leave it without a replica until somebody asks for one."""
    autoscaling = deployment.spec.autoscaling
    if autoscaling is None or deployment.metadata.deletion_timestamp is not None:
        return False
    fewest = (autoscaling.min_replicas, *(w.min_replicas for w in autoscaling.schedule))
    return 0 in fewest


def _why_not(name: str, seen: Seen) -> str:
    """Return why the deployment does not answer, in the reconciler's words where there are any."""
    deployment = seen.deployments.get(name)
    if deployment is None:
        return f"ModelDeployment {name} does not exist."
    if deployment.spec.replicas == 0 and deployment.spec.autoscaling is None:
        return f"ModelDeployment {name} is scaled to 0 replicas."
    status = seen.statuses.get(name)
    told = _telling(status.conditions if status is not None else ())
    if told is None:
        return f"ModelDeployment {name} has no endpoint yet, and the reconciler says nothing of it."
    return f"ModelDeployment {name}: {told.reason}: {told.message or told.type}."


def _telling(conditions: tuple[Condition, ...]) -> Condition | None:
    """Return the condition that says most: what is refused, then what is under way, then what is."""
    found = [find_condition(conditions, type_) for type_ in ("Placed", "Progressing", "Available")]
    placed, progressing, available = found
    if placed is not None and placed.status != Truth.TRUE:
        return placed
    return progressing or available or placed
