"""The fleet on one screen: Macs with their models and load, public names with their Macs, gateways. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from insight import fleet_views
from insight.conditions import Row
from insight.fleet_caches import FleetCaches
from insight.root_cause import Problem, find_problems
from reconciler.listers.caches import BY_KIND
from schemas.deployment import ModelDeployment, ModelDeploymentStatus
from schemas.replica import Endpoint
from schemas.route import ModelRoute
from store import keys

Json: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLoad:
    """Requests at one gateway now."""

    running: Mapping[str, int] = field(default_factory=dict)
    """Requests at engines, by replica."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Requests that wait, by model name."""
    active: int = 0
    problem: str = ""
    """The reason why its load is unknown; empty if it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOnMac:
    """One replica, at its first Mac."""

    label: str
    """`NAME:DEPLOYMENT`, or the deployment alone."""
    replica: str
    is_ready: bool
    running: int | None
    """Requests at its engine; None if a gateway did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacStatus:
    """One Mac."""

    name: str
    state: str
    reason: str
    chip: str
    memory_bytes: int | None
    free_bytes: int | None
    """Memory for models that no replica was promised."""
    models: tuple[ModelOnMac, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNameStatus:
    """One public model name."""

    name: str
    deployments: tuple[str, ...]
    macs: tuple[str, ...]
    """Macs whose engines answer for it."""
    replicas: int
    """Engines that answer for it: the multiple of one for concurrent requests."""
    waiting: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStatus:
    """One gateway."""

    id: str
    url: str
    version: str
    active: int | None
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The whole screen."""

    sentence: str
    macs: tuple[MacStatus, ...]
    model_names: tuple[ModelNameStatus, ...]
    gateways: tuple[GatewayStatus, ...]
    loading: tuple[str, ...]
    """Models that load or wait for room, as in `writer loads in 14 s: qwen-0 gives way`."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    """Gateways whose load is unknown, and why."""


def fleet_status(
    caches: FleetCaches, loads: Mapping[str, GatewayLoad], now: datetime
) -> FleetStatus:
    """Return the status of a fleet; `loads` are those of the gateways, by id."""
    public_names = _public_names(caches)
    endpoints = list(caches.objects.endpoints.items.values())
    silent = [id_ for id_, load in loads.items() if load.problem]
    running = _sum(load.running for load in loads.values())
    waiting = _sum(load.waiting for load in loads.values())
    macs, models = fleet_views.rows(caches, "macs"), fleet_views.rows(caches, "models")
    labels = _labels(public_names)
    gateways = tuple(
        GatewayStatus(
            id=str(row["name"]),
            url=str(row["url"]),
            version=str(row["version"]),
            active=_active(loads.get(str(row["name"]))),
            problem=loads[str(row["name"])].problem if str(row["name"]) in loads else "not asked",
        )
        for row in fleet_views.rows(caches, "gateways")
    )
    placed = _placed(caches, labels, None if silent else running)
    return FleetStatus(
        sentence=fleet_views.sentence(caches, macs, models, silent),
        macs=tuple(_mac(row, placed.get(str(row["name"]), ())) for row in macs),
        model_names=tuple(
            _model_name(name, of, endpoints, None if silent else waiting.get(name, 0))
            for name, of in sorted(public_names.items())
        ),
        gateways=gateways,
        loading=tuple(_loading(caches, now)),
        problems=tuple(find_problems(caches)),
        warnings=tuple(
            f"gateway {gateway.id}: {gateway.problem}" for gateway in gateways if gateway.problem
        ),
    )


def _loading(caches: FleetCaches, now: datetime) -> Iterator[str]:
    """Yield the models that requests or people wait for, with the expected time."""
    statuses = caches.objects.statuses.items
    for name in fleet_views.names(caches, "models"):
        status = statuses.get(keys.status_key("ModelDeployment", name))
        if isinstance(status, ModelDeploymentStatus) and status.loading is not None:
            yield f"{name} {status.loading.text(now)}"


def _active(load: GatewayLoad | None) -> int | None:
    return None if load is None or load.problem else load.active


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            found[name] = found.get(name, 0) + count
    return found


def _public_names(caches: FleetCaches) -> dict[str, tuple[str, ...]]:
    """Return the deployments behind each public name: of routes, and served names; a deployment without has its own."""
    specs, found = caches.objects.specs, dict[str, list[str]]()
    named: set[str] = set()
    for route in specs.by_index(BY_KIND, "ModelRoute").values():
        if isinstance(route, ModelRoute):
            backends = [backend.deployment for backend in route.spec.backends if backend.deployment]
            found.setdefault(route.spec.model, []).extend(backends)
            named.update(backends)
    for model in specs.by_index(BY_KIND, "ModelDeployment").values():
        if isinstance(model, ModelDeployment):
            others = [one for one in model.spec.served_names if one != model.name]
            for name in others or ([] if model.name in named else [model.name]):
                found.setdefault(name, []).append(model.name)
    return {name: tuple(dict.fromkeys(of)) for name, of in found.items()}


def _labels(public_names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return `NAME:DEPLOYMENT` by deployment, with the first public name of each."""
    labels: dict[str, str] = {}
    for name, of in sorted(public_names.items()):
        for deployment in of:
            labels.setdefault(
                deployment, deployment if name == deployment else f"{name}:{deployment}"
            )
    return labels


def _placed(
    caches: FleetCaches, labels: Mapping[str, str], running: Mapping[str, int] | None
) -> dict[str, tuple[ModelOnMac, ...]]:
    placed: dict[str, tuple[ModelOnMac, ...]] = {}
    for row in fleet_views.rows(caches, "replicas"):
        name, deployment = str(row["name"]), str(row["deployment"])
        macs = row["macs"]
        assert isinstance(macs, list)
        label = labels.get(deployment, deployment)
        for rank, mac in enumerate(macs):
            model_on_mac = ModelOnMac(
                label=label if len(macs) == 1 else f"{label} (rank {rank} of {len(macs)})",
                replica=name,
                is_ready=bool(row["hasEndpoint"]),
                running=None if running is None else running.get(name, 0),
            )
            placed[mac] = (*placed.get(mac, ()), model_on_mac)
    return placed


def _mac(row: Row, models: tuple[ModelOnMac, ...]) -> MacStatus:
    memory, allocatable, promised = (
        row[one] for one in ("memoryBytes", "allocatableBytes", "promisedBytes")
    )
    free = None
    if isinstance(allocatable, int) and isinstance(promised, int):
        free = allocatable - promised
    state = str(row["state"])
    if state == "online" and row["isDraining"]:
        state = "draining"
    elif state == "online" and row["isCordoned"]:
        state = "cordoned"
    return MacStatus(
        name=str(row["name"]),
        state=state,
        reason=str(row["reason"]),
        chip=str(row["chip"] or "?").removeprefix("Apple "),
        memory_bytes=memory if isinstance(memory, int) else None,
        free_bytes=free,
        models=models,
    )


def _model_name(
    name: str, deployments: tuple[str, ...], endpoints: Sequence[Endpoint], waiting: int | None
) -> ModelNameStatus:
    there = [endpoint.spec for endpoint in endpoints if endpoint.spec.deployment in deployments]
    return ModelNameStatus(
        name=name,
        deployments=deployments,
        macs=tuple(sorted({spec.node for spec in there})),
        replicas=len(there),
        waiting=waiting,
    )
