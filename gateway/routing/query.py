"""Input of one choice: the routing query of the request, and the health of the endpoints."""

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.routing.table import EngineEndpoint, Origin

_NOBODY: frozenset[EngineEndpoint] = frozenset()
_HALF = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """Load and failures of the endpoints as this gateway sees them. Live views."""

    in_flight: Mapping[Origin, int] = field(default_factory=lambda: MappingProxyType({}))
    """This gateway's requests; exact."""
    others_in_flight: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Requests of other gateways, as the engines reported a moment ago."""
    headroom: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Free part of each engine's memory, 0..1; a missing value counts as 1."""
    ejected: AbstractSet[Origin] = frozenset()
    """Endpoints that failed a moment ago: used only if no other remains."""


class RoutingQuery:
    """One request as routing sees it. A plain object: one is created for each request and filled in step by step."""

    __slots__ = (
        "blocks",
        "cached",
        "draw",
        "failed",
        "headers",
        "name",
        "session",
        "session_key",
        "sticky_mark",
        "turn",
    )

    def __init__(
        self,
        name: str,
        draw: float,
        failed: AbstractSet[EngineEndpoint] = _NOBODY,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.name = name
        self.draw = draw
        """Random number, 0..1, for all draws of the request."""
        self.failed = failed
        """Endpoints that failed this request; never chosen again."""
        self.headers = headers
        """Header names in lower case."""
        self.session = ""
        """The client's session key; empty if there is none."""
        self.sticky_mark = 0
        """The mark of the endpoint that last served the conversation; 0 if unknown."""
        self.cached: Sequence[tuple[int, float]] = ()
        """Marks of endpoints with a cached beginning of the prompt and the cached part, the longest first."""
        self.session_key = 0
        """The key under which the session is remembered; 0 if it is not."""
        self.blocks: Sequence[tuple[int, int]] = ()
        """The end and the key of each block of the prompt."""
        self.turn = 0
        """The number of earlier requests to the model."""

    def side(self) -> tuple[float, float]:
        """Return the draws that select the backend and the version, each 0..1.

        A session's draws depend on its name only, so that every gateway selects the same.
        """
        if not self.session:
            # A large factor makes the second draw independent of the first.
            return self.draw, self.draw * 1_000_003 % 1
        text = f"{self.name}\0{self.session}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"fleet-side").digest())
        return drawn % _HALF / _HALF, drawn // _HALF / _HALF
