"""How the engines stand with a gateway right now: values only, and live views at that."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

from gateway.routing.table import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the engines stand with this gateway right now."""

    in_flight: Mapping[Origin, int] = field(default_factory=lambda: MappingProxyType({}))
    """Requests of ours that are there now; exact."""
    elsewhere: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Requests of others that are there, by the engines' own words of a moment ago."""
    headroom: Mapping[Origin, float] = field(default_factory=lambda: MappingProxyType({}))
    """Which part of its memory an engine has left, 0 to 1; 1 if it is not in here."""
    penalised: AbstractSet[Origin] = frozenset()
    """Those that failed a moment ago: asked only if nobody else is left."""
