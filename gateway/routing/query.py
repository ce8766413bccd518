"""How the engines stand with a gateway right now: values only, and live views at that.

One request as routing sees it: what it asks for, what it is drawn with, and what is remembered of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.routing.table import EngineEndpoint, Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointHealth:
    """How the engines stand with this gateway right now."""

    in_flight: Mapping[Origin, int] = field(default_factory=lambda: MappingProxyType({}))
    """Requests of ours that are there now; exact."""
    elsewhere: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Requests of others that are there, by the engines' own words of a moment ago."""
    headroom: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Which part of its memory an engine has left, 0 to 1; 1 if it is not in here."""
    penalised: AbstractSet[Origin] = frozenset()
    """Those that failed a moment ago: asked only if nobody else is left."""


_NOBODY: frozenset[EngineEndpoint] = frozenset()
_HALF = 1 << 32


class RoutingQuery:
    """A plain object and no dataclass: one is made for each request, and filled as it is looked at."""

    __slots__ = (
        "blocks",
        "cached",
        "draw",
        "failed",
        "headers",
        "name",
        "session",
        "session_key",
        "stays",
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
        """0..1, decides wherever chance does."""
        self.failed = failed
        """Who was asked for this very request: never chosen again."""
        self.headers = headers
        """Names in lower case."""
        self.session = ""
        """What the client calls its conversation; empty if nothing."""
        self.stays = 0
        """The mark of the engine that had the conversation last; 0 if none."""
        self.cached: Sequence[tuple[int, float]] = ()
        """Marks of engines that have read the prompt's beginning, the longest first, and which part of it."""
        self.session_key = 0
        """What the conversation is remembered under; 0 if it is not."""
        self.blocks: Sequence[tuple[int, int]] = ()
        """Where the prompt's blocks end, and what they are remembered under."""
        self.turn = 0
        """How many requests of the name came before."""

    def side(self) -> tuple[float, float]:
        """Return what decides between backends and between versions, each in 0..1.

        Of a session it is made from its name alone, so that it comes to the same side at every gateway.
        """
        if not self.session:
            # A large factor: the second must not follow from the first.
            return self.draw, self.draw * 1_000_003 % 1
        text = f"{self.name}\0{self.session}".encode("utf-8", "surrogatepass")
        drawn = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"fleet-side").digest())
        return drawn % _HALF / _HALF, drawn // _HALF / _HALF
