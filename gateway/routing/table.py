"""What a gateway knows of names and engines at one moment: values only."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from schemas.routing import Routing

_USUAL = Routing()
# Of a deployment that says nothing (schemas/deployment.py).
USUAL_CONCURRENCY = 4


class Origin(NamedTuple):
    """Where an engine listens; what connections, load and penalties are counted by."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
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
    concurrency: int = field(default=USUAL_CONCURRENCY, compare=False)
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
class Pool:
    """Engines among which the strategy alone decides."""

    targets: tuple[Target, ...]
    by_mark: Mapping[int, Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A part of a share: everybody, or one of two versions of a deployment of which one is on trial."""

    weight: float
    pools: tuple[Pool, ...]
    """The first that has anybody able counts: our own site's before others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a name's requests and who may serve it. Made by shares.py."""

    deployments: tuple[str, ...]
    weight: int
    leased: tuple[Target, ...]
    orphans: tuple[Target, ...]
    """Engines whose lease is lost but which may live on; asked when nobody else is left."""
    arms: tuple[Arm, ...]
    """Those leased, sorted."""
    last: Arm
    """The orphans."""
    routing: Routing
    score: tuple[float, float, float, float]
    """What a loaded model, free memory, a short queue and a prefix read before count, of 1."""
    minds_prefixes: bool
    """Whether it counts who has read a prompt's beginning; who asks for turns or chance gets just that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Other shares for the requests that carry certain headers."""

    headers: tuple[tuple[bytes, bytes | None], ...]
    """Names in lower case, and their values; None: any."""
    shares: tuple[Share, ...]
    reason: str
    sleepers: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One name that clients may use."""

    name: str
    created: int
    shares: tuple[Share, ...]
    reason: str
    """Why nothing is ready, should that be so."""
    sleepers: tuple[tuple[int, str], ...] = ()
    """Deployments that a request brings back from zero, with their weights."""
    routing: Routing = _USUAL
    """How its requests are shared out and what is done when one fails."""
    rules: tuple[Rule, ...] = ()
    """The first that matches is asked instead of `shares`."""
    fallbacks: tuple[Share, ...] = ()
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

    def _some(self) -> tuple[Share, ...]:
        ruled = (share for rule in self.rules for share in rule.shares)
        return (*self.shares, *ruled, *self.fallbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A new version of a deployment that gets a part of its requests."""

    template: str
    weight: int
    """Percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Everything a gateway knows of names and engines at one moment."""

    models: Mapping[str, Model] = field(default_factory=lambda: MappingProxyType({}))
    endpoints: int = 0
    """With a lease."""
    kept: int = 0
    """Known from before, whose lease is lost or cannot be seen."""
