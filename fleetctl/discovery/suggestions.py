"""Suggestions of addresses, from several sources at once. They choose what to try; TLS decides what to trust."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from fleetctl.fleets.join_client import JoinAddress
from schemas.wire.discovery import AnnouncedRole

SourceName: TypeAlias = Literal["seeds", "mdns", "tailscale"]
SOURCES: Final[tuple[SourceName, ...]] = ("seeds", "mdns", "tailscale")
MAX_SUGGESTIONS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """An address at which a fleet may answer, and what its source says of it. Nothing of it is proven."""

    source: SourceName
    role: AnnouncedRole
    name: str
    address: JoinAddress
    fleet: str = ""
    authorities: tuple[str, ...] = ()
    """SHA-256 of the fleet's authorities; () if the source does not know them."""
    is_tls: bool = True
    age_s: float | None = None
    note: str = ""

    def may_belong_to(self, authority_hash: bytes) -> bool:
        """Return whether a join port of the fleet with this authority may be there."""
        is_claimed = authority_hash.hex() in self.authorities
        return self.role == "control" and (is_claimed or not self.authorities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The suggestions of the sources, and why some suggest nothing."""

    suggestions: tuple[Suggestion, ...] = ()
    problems: tuple[str, ...] = ()


class SuggestionSource(Protocol):
    """A source of suggestions. One that cannot be asked reports a problem, and never fails."""

    @property
    def name(self) -> SourceName: ...

    async def suggest(self) -> Findings: ...


async def collect(sources: Sequence[SuggestionSource]) -> Findings:
    """Return what all sources suggest, in their order; the first suggestion of an address and a role counts."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(source.suggest(), name=source.name) for source in sources]
    suggestions: dict[object, Suggestion] = {}
    problems: list[str] = []
    for task in tasks:
        findings = task.result()
        problems += findings.problems
        for suggestion in findings.suggestions:
            suggestions.setdefault((suggestion.address, suggestion.role), suggestion)
    return Findings(
        suggestions=tuple(suggestions.values())[:MAX_SUGGESTIONS], problems=tuple(problems)
    )
