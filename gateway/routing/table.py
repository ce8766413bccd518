"""Routing table: models, weighted backends and endpoints; the health of endpoints and the query of a request.

Values only, and the builder that prepares backends for selection.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final

import msgspec

from schemas import duration
from schemas.replica import EndpointHardware
from schemas.routing import HealthCheck, Routing, ScoreWeights
from schemas.wire import headers as wire_headers
from schemas.wire.engine_address import EngineAddress

_USUAL = Routing()
_UNKNOWN_HARDWARE = EndpointHardware()
# The default of deployments (schemas/deployment.py).
DEFAULT_CONCURRENCY = 4
_HALF = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalServer:
    """The request form of a server that the fleet did not start."""

    path: str
    """The path of its API, such as "/v1"."""
    model: str
    """The model's name there."""
    authorization: bytes = field(default=b"", repr=False)
    """The header line with its key; empty if it gets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPolicy:
    """Health checks of one endpoint, and the failures that eject it."""

    interval_s: float | None = None
    """Silence after which it is checked; None: the gateway's default."""
    timeout_s: float | None = None
    """The longest wait for an answer; None: the gateway's default."""
    failures: int = HealthCheck().unhealthy_threshold
    """Failures in a row that eject it."""


DEFAULT_CHECKS = CheckPolicy()


def check_policy(declared: HealthCheck) -> CheckPolicy:
    """Return the checks as numbers, in seconds."""
    if declared == _USUAL.health_check:
        return DEFAULT_CHECKS
    interval, timeout = declared.interval, declared.timeout
    return CheckPolicy(
        interval_s=None if interval is None else duration.parse(interval),
        timeout_s=None if timeout is None else duration.parse(timeout),
        failures=declared.unhealthy_threshold,
    )


class EndpointName(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An endpoint as records name it, after it is gone, too."""

    replica: str
    node: str
    deployment: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """One engine, or one external server, that may be tried."""

    replica: str
    node: str
    deployment: str
    origin: EngineAddress
    """The key of connections, load and failures."""
    names: tuple[str, ...]
    """Names that the engine answers to, its deployment's own first."""
    version: int
    """Changes when the endpoint is published anew, after which it may be tried again."""
    template: str = ""
    """The version of the deployment that runs there; empty if unknown."""
    # The fields below describe the engine and are not part of its identity.
    site: str = field(default="", compare=False)
    concurrency: int = field(default=DEFAULT_CONCURRENCY, compare=False)
    """The number of requests that the engine processes at once."""
    points: float = field(default=0.0, compare=False)
    """Points for chip, GPU cores and memory (schemas/chips.py)."""
    is_fit: bool = field(default=True, compare=False)
    """True if the Mac meets the minimum for a model of this size."""
    start_s: float = field(default=0.0, compare=False)
    """Seconds in which the engine started; 0 if unknown."""
    hardware: EndpointHardware = field(default=_UNKNOWN_HARDWARE, compare=False)
    """The hardware of its Mac; equal Macs share one object."""
    parameters: int = field(default=0, compare=False)
    """Parameters of the model; 0 if the number is not known."""
    external: ExternalServer | None = field(default=None, compare=False)
    """None for engines of the fleet."""
    checks: CheckPolicy = field(default=DEFAULT_CHECKS, compare=False)
    mark: int = field(default=0, init=False, compare=False)
    """32-bit id for affinity. It does not depend on `version`: an engine keeps its cache when its agent restarts."""
    # Computed once for all requests.
    name: EndpointName = field(init=False, compare=False, repr=False)
    lines: bytes = field(default=b"", init=False, compare=False, repr=False)
    """Header lines that name the node and the replica to clients."""

    def __post_init__(self) -> None:
        mark = zlib.crc32(f"{self.replica} {self.node}".encode())
        object.__setattr__(self, "mark", mark or 1)
        name = EndpointName(self.replica, self.node, self.deployment, self.origin.url)
        object.__setattr__(self, "name", name)
        lines = f"{wire_headers.NODE}: {self.node}\r\n{wire_headers.REPLICA}: {self.replica}\r\n"
        object.__setattr__(self, "lines", lines.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPool:
    """Endpoints among which the strategy decides alone."""

    endpoints: tuple[EngineEndpoint, ...]
    by_mark: Mapping[int, EngineEndpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """A part of a backend: all endpoints, or one of two versions during a canary."""

    weight: float
    pools: tuple[EndpointPool, ...]
    """The first pool with an available endpoint is used: the gateway's own site comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedBackend:
    """A share of a model's requests and the endpoints that may serve it. `BackendBuilder` creates it."""

    deployments: tuple[str, ...]
    weight: int
    leased: tuple[EngineEndpoint, ...]
    orphans: tuple[EngineEndpoint, ...]
    """Endpoints that lost their lease but may live; used when no other remains."""
    subsets: tuple[Subset, ...]
    """Leased endpoints, sorted."""
    orphan_subset: Subset
    """The orphans."""
    routing: Routing
    score: tuple[float, float, float, float]
    """Weights of a loaded model, free memory, a short queue and a cached prefix; their sum is 1."""
    uses_prefixes: bool
    """True if cached prefixes influence the choice; never for RoundRobin and Random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRule:
    """Other backends for requests with certain headers."""

    headers: tuple[tuple[bytes, bytes | None], ...]
    """Names in lower case and values; None: any value."""
    backends: tuple[WeightedBackend, ...]
    reason: str
    awaited: tuple[tuple[int, str], ...] = ()
    recovering: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorTarget:
    """A deployment that gets copies of requests."""

    deployment: str
    percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model name that clients may use."""

    name: str
    created: int
    backends: tuple[WeightedBackend, ...]
    reason: str
    """The reason to report if no endpoint is ready."""
    parent: str = ""
    """The deployment of an adapter; empty if the name is no adapter's."""
    awaited: tuple[tuple[int, str], ...] = ()
    """Deployments for whose first replica a request waits, with their weights: they may be scaled to zero, or are new."""
    recovering: str = ""
    """A deployment that served before and has no endpoint now: its replicas are starting again. Empty if there is none."""
    routing: Routing = _USUAL
    """Routing settings of the model."""
    routing_source: str = ""
    """The object that declares them, such as "ModelDeployment/qwen": its names share the limits in them."""
    rules: tuple[HeaderRule, ...] = ()
    """The first matching rule replaces `backends`."""
    fallbacks: tuple[WeightedBackend, ...] = ()
    """Used in this order when the backends have no healthy endpoint."""
    mirror: MirrorTarget | None = None
    """Gets copies of requests; None if there is no such deployment."""
    session_s: float = 0.0
    """The lifetime of a session after its last request, in seconds; 0: no sessions."""
    is_prefix_aware: bool = False
    """True if cached prefixes influence the choice in any backend."""
    shares_cache: bool = False
    """True if clients with different API keys share cached prompts."""
    context_length: int | None = None
    """Longest prompt plus output that each of its deployments takes, in tokens; None if there is no deployment."""
    body_limit: int = 0
    """Largest body of one prompt that any of its deployments takes, in bytes; 0 if that is not known of one of them."""
    has_one_endpoint: bool = False
    """True if there is at most one endpoint."""
    start_s: float = 0.0
    """Seconds in which the slowest of its engines started; 0 if unknown."""

    def ready(self) -> int:
        """Return the number of replicas with a lease."""
        leased = (endpoint for backend in self.all_backends() for endpoint in backend.leased)
        return len({endpoint.replica for endpoint in leased})

    def kept(self) -> int:
        """Return the number of further replicas without a lease, or from the saved state."""
        orphans = (endpoint for backend in self.all_backends() for endpoint in backend.orphans)
        return len({endpoint.replica for endpoint in orphans})

    def deployments(self) -> tuple[str, ...]:
        """Return the deployments of its backends, in order."""
        return tuple(
            dict.fromkeys(name for backend in self.backends for name in backend.deployments)
        )

    def all_backends(self) -> tuple[WeightedBackend, ...]:
        """Return the backends, those of rules and the fallbacks."""
        ruled = (backend for rule in self.rules for backend in rule.backends)
        return (*self.backends, *ruled, *self.fallbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySplit:
    """Traffic split between two versions of a deployment."""

    template: str
    weight: int
    """In percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """All models and endpoints that the gateway knows at one moment."""

    models: Mapping[str, ServedModel] = field(default_factory=lambda: MappingProxyType({}))
    body_limit: int = 0
    """The largest limit of a model's bodies; 0 if a model's limit is not known."""
    endpoints: int = 0
    """The number of endpoints with a lease."""
    kept: int = 0
    """The number of endpoints without a lease, or from the saved state."""
    refused: int = 0
    """The number of published endpoints that are not used, such as those of a node without the replica."""


_NO_TRIALS: Mapping[str, CanarySplit] = MappingProxyType({})


class BackendBuilder:
    """Prepares backends for selection, so that a request costs the same with ten endpoints and with a thousand."""

    def __init__(self, canaries: Mapping[str, CanarySplit] = _NO_TRIALS, site: str = "") -> None:
        """`trials`: canary splits by deployment; `site`: the gateway's own, empty if it has none."""
        self._canaries = canaries
        self._site = site

    def backend(
        self,
        deployments: Sequence[str],
        *,
        leased: Iterable[EngineEndpoint] = (),
        orphans: Iterable[EngineEndpoint] = (),
        weight: int = 1,
        routing: Routing = _USUAL,
    ) -> WeightedBackend:
        """Return the backend; the order of the endpoints makes no difference."""
        here, gone = _sorted(leased), _sorted(orphans)
        pools = partial(_pools, routing=routing, site=self._site)
        return WeightedBackend(
            deployments=tuple(deployments),
            weight=weight,
            leased=here,
            orphans=gone,
            subsets=tuple(_subsets(here, self._canaries, pools)),
            orphan_subset=Subset(weight=1.0, pools=pools(gone)),
            routing=routing,
            score=_score(routing.weights),
            uses_prefixes=routing.prefix_affinity.enabled
            and routing.strategy not in ("RoundRobin", "Random"),
        )


def _score(weights: ScoreWeights) -> tuple[float, float, float, float]:
    parts = (
        weights.model_loaded,
        weights.memory_headroom,
        weights.queue_depth,
        weights.prefix_affinity,
    )
    loaded, memory, queue, prefix = (part / sum(parts) for part in parts)
    return loaded, memory, queue, prefix


def _sorted(endpoints: Iterable[EngineEndpoint]) -> tuple[EngineEndpoint, ...]:
    return tuple(sorted(endpoints, key=lambda t: (t.replica, t.origin, t.version)))


def _subsets(
    leased: Sequence[EngineEndpoint],
    canaries: Mapping[str, CanarySplit],
    pools: Callable[[Sequence[EngineEndpoint]], tuple[EndpointPool, ...]],
) -> Iterator[Subset]:
    """Yield the subsets with their weights. A canary version gets its part of its deployment's share.

    New versions come first, then the old ones: a growing weight moves requests from old to new
    only.
    """
    others: list[EngineEndpoint] = []
    old_arms = []
    for name in dict.fromkeys(endpoint.deployment for endpoint in leased):
        mine, canary = [t for t in leased if t.deployment == name], canaries.get(name)
        new = [t for t in mine if canary is not None and t.template == canary.template]
        # If only one version has endpoints, it gets all requests.
        if canary is None or not new or len(new) == len(mine):
            others += mine
            continue
        old = [t for t in mine if t.template != canary.template]
        part = len(mine) * canary.weight / 100
        yield Subset(weight=part, pools=pools(new))
        old_arms.append(Subset(weight=len(mine) - part, pools=pools(old)))
    yield from old_arms
    if others:
        yield Subset(weight=float(len(others)), pools=pools(others))


def _pools(
    endpoints: Sequence[EngineEndpoint], *, routing: Routing, site: str
) -> tuple[EndpointPool, ...]:
    """Rank endpoints into pools: a later pool is used only if the earlier ones have no available endpoint."""
    minds_site = routing.site_affinity and bool(site)
    minds_size = routing.strategy == "HardwareAware"
    ranked: dict[tuple[bool, bool], list[EngineEndpoint]] = {}
    for endpoint in endpoints:
        rank = (minds_site and endpoint.site != site, minds_size and not endpoint.is_fit)
        ranked.setdefault(rank, []).append(endpoint)
    return tuple(
        EndpointPool(endpoints=tuple(some), by_mark=MappingProxyType({t.mark: t for t in some}))
        for _, some in sorted(ranked.items(), key=lambda item: item[0])
    )


_NOBODY: frozenset[EngineEndpoint] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """Load and failures of the endpoints as this gateway sees them. Live views."""

    in_flight: Mapping[EngineAddress, int] = field(default_factory=lambda: MappingProxyType({}))
    """This gateway's requests; exact."""
    others_in_flight: Mapping[EngineAddress, float] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Requests of other gateways, as the engines reported a moment ago."""
    headroom: Mapping[EngineAddress, float] = field(default_factory=lambda: MappingProxyType({}))
    """Free part of each engine's memory, 0..1; a missing value counts as 1."""
    ejected: AbstractSet[EngineAddress] = frozenset()
    """Endpoints that failed a moment ago: used only if no other remains."""
    gpu_load: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Busy part of the GPU of each Mac, 0..1, by node; a missing value costs an endpoint no points."""


# A draw has 53 random bits. The first select the backend, those after the first 12 the version of a deployment, and
# those after the first 24 the endpoint, so that the choices are independent.
_VERSION_BITS: Final = 1 << 12
_ENDPOINT_BITS: Final = 1 << 24


class RoutingQuery(msgspec.Struct):
    """One request as routing sees it, filled in step by step."""

    name: str
    draw: float
    """Random number, 0..1, for all draws of the request."""
    failed: AbstractSet[EngineEndpoint] = _NOBODY
    """Endpoints that failed this request; never chosen again."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Header names in lower case."""
    session: str = ""
    """The client's session key; empty if there is none."""
    sticky_mark: int = 0
    """The mark of the endpoint that last served the conversation; 0 if unknown."""
    cached: Sequence[tuple[int, float]] = ()
    """Marks of endpoints with a cached beginning of the prompt and the cached part, the longest first."""
    session_key: int = 0
    """The key under which the session is remembered; 0 if it is not."""
    blocks: Sequence[tuple[int, int]] = ()
    """The end and the key of each block of the prompt."""
    turn: int = 0
    """The number of earlier requests to the model."""

    @property
    def endpoint_draw(self) -> float:
        """The draw that selects the endpoint, 0..1."""
        return self.draw * _ENDPOINT_BITS % 1

    def side(self) -> tuple[float, float]:
        """Return the draws that select the backend and the version, each 0..1.

        A session's draws depend on its name only, so that every gateway selects the same.
        """
        if not self.session:
            return self.draw, self.draw * _VERSION_BITS % 1
        text = f"{self.name}\0{self.session}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"fleet-side").digest())
        return drawn % _HALF / _HALF, drawn // _HALF / _HALF
