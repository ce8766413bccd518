"""What a gateway knows of names and engines at one moment: values only.

Makes shares ready for choosing, so that a request costs the same among ten engines and among a thousand. Pure.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from schemas.routing import Routing, ScoreWeights

_USUAL = Routing()
# Of a deployment that says nothing (schemas/deployment.py).
DEFAULT_CONCURRENCY = 4


class Origin(NamedTuple):
    """Where an engine listens; what connections, load and penalties are counted by."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEndpoint:
    """One engine that may be asked."""

    replica: str
    node: str
    deployment: str
    origin: Origin
    names: tuple[str, ...]
    """Names that the engine itself answers to, its deployment's own first."""
    version: int
    """Changes when the endpoint is published anew: then it may be tried once more."""
    template: str = ""
    """The version of the deployment that runs there; agents of before said nothing of it."""
    # What follows is about the engine; it does not make it another one.
    site: str = field(default="", compare=False)
    concurrency: int = field(default=DEFAULT_CONCURRENCY, compare=False)
    """How many requests it works on at once."""
    points: float = field(default=0.0, compare=False)
    """For its chip, GPU cores and memory (hardware.py)."""
    is_fit: bool = field(default=True, compare=False)
    """Whether its Mac is one for a model of that size."""
    mark: int = field(default=0, init=False, compare=False)
    """32 bits that conversations remember it by. Not of `version`: an engine whose agent was updated has its cache."""
    # Made once for all requests.
    host: bytes = field(default=b"", init=False, compare=False, repr=False)
    """The engine's host and port, as requests name them."""
    lines: bytes = field(default=b"", init=False, compare=False, repr=False)
    """The header lines that tell clients who answered."""

    def __post_init__(self) -> None:
        mark = zlib.crc32(f"{self.replica} {self.node}".encode())
        object.__setattr__(self, "mark", mark or 1)
        host, port = self.origin
        named = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        object.__setattr__(self, "host", named.encode("ascii", "replace"))
        lines = f"x-fleet-node: {self.node}\r\nx-fleet-replica: {self.replica}\r\n"
        object.__setattr__(self, "lines", lines.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPool:
    """Engines among which the strategy alone decides."""

    targets: tuple[EngineEndpoint, ...]
    by_mark: Mapping[int, EngineEndpoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """A part of a share: everybody, or one of two versions of a deployment of which one is on trial."""

    weight: float
    pools: tuple[EndpointPool, ...]
    """The first that has anybody able counts: our own site's before others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedBackend:
    """A part of a name's requests and who may serve it. Made by shares.py."""

    deployments: tuple[str, ...]
    weight: int
    leased: tuple[EngineEndpoint, ...]
    orphans: tuple[EngineEndpoint, ...]
    """Engines whose lease is lost but which may live on; asked when nobody else is left."""
    arms: tuple[Subset, ...]
    """Those leased, sorted."""
    last: Subset
    """The orphans."""
    routing: Routing
    score: tuple[float, float, float, float]
    """What a loaded model, free memory, a short queue and a prefix read before count, of 1."""
    minds_prefixes: bool
    """Whether it counts who has read a prompt's beginning; who asks for turns or chance gets just that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRule:
    """Other shares for the requests that carry certain headers."""

    headers: tuple[tuple[bytes, bytes | None], ...]
    """Names in lower case, and their values; None: any."""
    shares: tuple[WeightedBackend, ...]
    reason: str
    sleepers: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One name that clients may use."""

    name: str
    created: int
    shares: tuple[WeightedBackend, ...]
    reason: str
    """Why nothing is ready, should that be so."""
    sleepers: tuple[tuple[int, str], ...] = ()
    """Deployments that a request brings back from zero, with their weights."""
    routing: Routing = _USUAL
    """How its requests are shared out and what is done when one fails."""
    rules: tuple[HeaderRule, ...] = ()
    """The first that matches is asked instead of `shares`."""
    fallbacks: tuple[WeightedBackend, ...] = ()
    """Asked in this order when the others cannot be."""
    session_s: float = 0.0
    """How long a conversation is remembered after its last request; 0: not at all."""
    is_prefix_aware: bool = False
    """Whether it counts for any of its shares who has read a prompt's beginning before."""
    is_sole: bool = False
    """Whether there is never more than one engine to choose from."""

    def ready(self) -> int:
        """Return how many leased endpoints serve the name."""
        return len({target.replica for share in self._some() for target in share.leased})

    def kept(self) -> int:
        """Return how many more are known from before: their lease is lost, or the store away since we started."""
        return len({target.replica for share in self._some() for target in share.orphans})

    def _some(self) -> tuple[WeightedBackend, ...]:
        ruled = (share for rule in self.rules for share in rule.shares)
        return (*self.shares, *ruled, *self.fallbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySplit:
    """A new version of a deployment that gets a part of its requests."""

    template: str
    weight: int
    """Percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """Everything a gateway knows of names and engines at one moment."""

    models: Mapping[str, ServedModel] = field(default_factory=lambda: MappingProxyType({}))
    endpoints: int = 0
    """With a lease."""
    kept: int = 0
    """Known from before, whose lease is lost or cannot be seen."""


_NO_TRIALS: Mapping[str, CanarySplit] = MappingProxyType({})


class BackendBuilder:
    """Makes the shares of one table."""

    def __init__(self, trials: Mapping[str, CanarySplit] = _NO_TRIALS, site: str = "") -> None:
        """`trials` by deployment; `site` is the gateway's own, empty if it has none."""
        self._trials = trials
        self._site = site

    def share(
        self,
        deployments: Sequence[str],
        *,
        leased: Iterable[EngineEndpoint] = (),
        orphans: Iterable[EngineEndpoint] = (),
        weight: int = 1,
        routing: Routing = _USUAL,
    ) -> WeightedBackend:
        """Return the share; the order of what is given makes no difference."""
        here, gone = _sorted(leased), _sorted(orphans)
        preference = _PoolRanking(routing, self._site)
        return WeightedBackend(
            deployments=tuple(deployments),
            weight=weight,
            leased=here,
            orphans=gone,
            arms=tuple(_subsets(here, self._trials, preference)),
            last=Subset(weight=1.0, pools=preference.pools(gone)),
            routing=routing,
            score=_score(routing.weights),
            minds_prefixes=routing.prefix_affinity.enabled
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


def _sorted(targets: Iterable[EngineEndpoint]) -> tuple[EngineEndpoint, ...]:
    return tuple(sorted(targets, key=lambda t: (t.replica, t.origin, t.version)))


def _subsets(
    leased: Sequence[EngineEndpoint], trials: Mapping[str, CanarySplit], preference: "_PoolRanking"
) -> Iterator[Subset]:
    """Yield who may be asked, and how often: a version on trial gets its part of its deployment's part.

    The new versions come first, then their old ones: a growing weight moves requests from old to new only.
    """
    others: list[EngineEndpoint] = []
    old_arms = []
    for name in dict.fromkeys(target.deployment for target in leased):
        mine, trial = [t for t in leased if t.deployment == name], trials.get(name)
        new = [t for t in mine if trial is not None and t.template == trial.template]
        # Where only one of the versions can be asked, it gets everything.
        if trial is None or not new or len(new) == len(mine):
            others += mine
            continue
        old = [t for t in mine if t.template != trial.template]
        part = len(mine) * trial.weight / 100
        yield Subset(weight=part, pools=preference.pools(new))
        old_arms.append(Subset(weight=len(mine) - part, pools=preference.pools(old)))
    yield from old_arms
    if others:
        yield Subset(weight=float(len(others)), pools=preference.pools(others))


class _PoolRanking:
    """Who is asked only if others cannot be, whatever the load."""

    def __init__(self, routing: Routing, site: str) -> None:
        self._site = site if routing.site_affinity else ""
        self._minds_size = routing.strategy == "HardwareAware"

    def pools(self, targets: Sequence[EngineEndpoint]) -> tuple[EndpointPool, ...]:
        ranked: dict[tuple[bool, bool], list[EngineEndpoint]] = {}
        for target in targets:
            is_far = bool(self._site) and target.site != self._site
            ranked.setdefault((is_far, self._minds_size and not target.is_fit), []).append(target)
        return tuple(
            EndpointPool(targets=tuple(some), by_mark=MappingProxyType({t.mark: t for t in some}))
            for _, some in sorted(ranked.items(), key=lambda item: item[0])
        )
