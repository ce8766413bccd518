"""Check for loops of cables through Thunderbolt Bridges, which one Mac alone cannot see. Pure.

A bridge forwards what it receives, and macOS runs no spanning tree on it: in a loop, one broadcast floods every network
of the Macs for ever (dnet#69).
"""

from collections.abc import Iterator, Mapping, Sequence

from insight.doctor.findings import Finding, ok
from schemas.node import Node

_MAX_NAMES = 5


def check_bridges(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the loops of cables through the bridges of nodes; nothing where no cable joins two bridges."""
    owners = {
        port.domain: node.name
        for node in nodes
        if node.status is not None
        for port in node.status.fabric.ports
        if port.is_bridged and port.domain
    }
    cables = _cables(nodes, owners)
    if not cables:
        return
    loops = list(_find_loops(cables, owners))
    for names in loops:
        shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        yield Finding(
            check="thunderbolt bridge",
            level="FAIL",
            message=f"cables between the Thunderbolt Bridges of {shown} make a loop, which floods all their networks",
            advice="on each of them: sudo networksetup -deletenetworkservice 'Thunderbolt Bridge', and give each port an "
            "address (docs/operations/shardgroups.md)",
        )
    if not loops:
        yield ok("thunderbolt bridge", f"{len(cables)} cables join bridges, without a loop")


def _cables(nodes: Sequence[Node], owners: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the cables between bridged ports as pairs of domains, each once."""
    found = {
        tuple(sorted((port.domain, port.peer)))
        for node in nodes
        if node.status is not None
        for port in node.status.fabric.ports
        if port.domain in owners and port.peer in owners
    }
    return sorted((first, second) for first, second in found)


def _find_loops(
    cables: Sequence[tuple[str, str]], owners: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield the nodes of each group of bridges that has more cables than a tree."""
    groups: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in owners.values()}
    looped: set[str] = set()
    for first, second in cables:
        one, other = groups[owners[first]], groups[owners[second]]
        if one is other:
            looped.add(owners[first])
            continue
        joined = one | other
        groups.update(dict.fromkeys(joined, joined))
    yield from sorted({tuple(sorted(groups[name])) for name in looped})
