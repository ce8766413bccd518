"""What one look at the fleet saw, as values: what agents, engines and gateways said, and who said nothing. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from reconciler.demand.exposition import Sample


class Rank(msgspec.Struct, frozen=True, rename="camel"):
    """One rank of a replica, in the words of an agent's /v1/vitals; None where nobody could tell."""

    replica: str
    rank: int = 0
    state: str = "Ready"
    tokens: float | None = None
    """Made since its engine started."""
    in_flight: float | None = None
    """Sequences that hold a slot."""
    waiting: float | None = None
    """Requests in its queue."""
    active_bytes: float | None = None
    """In MLX's arrays."""
    proven_bytes: int = 0
    why: str = ""
    """Why there are no figures."""


class Memory(msgspec.Struct, frozen=True, rename="camel"):
    """A machine's memory."""

    total_bytes: int
    available_bytes: int
    allocatable_bytes: int
    """What models may use."""


class Vitals(msgspec.Struct, frozen=True, rename="camel"):
    """What an agent says."""

    memory: Memory
    ranks: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One node."""

    name: str
    memory: Memory | None = None
    """None if its agent said nothing."""
    ranks: tuple[Rank, ...] = ()
    """What runs there; without its agent, what engines said themselves."""
    is_known: bool = False
    """Whether `ranks` are all there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a replica is."""

    deployment: str
    nodes: tuple[str, ...]
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """One deployment, as the store has it."""

    name: str
    ready: int
    wanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Everything as of one moment."""

    at_s: float
    """On a clock that never goes back."""
    nodes: tuple[NodeSeen, ...] = ()
    deployments: tuple[Deployed, ...] = ()
    replicas: Mapping[str, Placed] = field(default_factory=dict)
    gateways: Mapping[str, Sample] = field(default_factory=dict)
    """Those that answered, by id."""
    has_all_gateways: bool = True
    reasons: tuple[str, ...] = ()
    """Why something is not known, a sentence each."""

    def ranks(self) -> dict[tuple[str, int], Rank]:
        """Return what is known of each rank of each replica."""
        return {(rank.replica, rank.rank): rank for node in self.nodes for rank in node.ranks}
