"""Check for loops of cables through Thunderbolt Bridges, which one Mac alone cannot see. Pure.

A bridge forwards what it receives, and macOS runs no spanning tree on it: in a loop, one broadcast floods every network
of the Macs for ever (dnet#69).
"""

from collections.abc import Iterator, Sequence

from insight.doctor.findings import Finding
from nodeagent.doctor.check import fail, ok
from schemas.node import Node

_MAX_NAMES = 5


def check_bridges(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Yield the loops of cables through the bridges of nodes; nothing where no cable joins two bridges."""
    ports = [
        (node.name, port)
        for node in nodes
        if node.status is not None
        for port in node.status.fabric.ports
    ]
    owners = {port.domain: name for name, port in ports if port.is_bridged and port.domain}
    # Each once, though both ends report it.
    cables = {
        (min(port.domain, port.peer), max(port.domain, port.peer))
        for _, port in ports
        if port.domain in owners and port.peer in owners
    }
    if not cables:
        return
    # A group of bridges that has more cables than a tree has a loop.
    groups = {name: frozenset((name,)) for name in owners.values()}
    looped: set[str] = set()
    for first, second in sorted(cables):
        group, other = groups[owners[first]], groups[owners[second]]
        if group is other:
            looped.add(owners[first])
        else:
            groups.update(dict.fromkeys(group | other, group | other))
    for names in sorted({tuple(sorted(groups[name])) for name in looped}):
        shown = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        yield fail(
            f"cables between the Thunderbolt Bridges of {shown} make a loop, which floods all their networks",
            "on each of them: `sudo fleetctl fabric setup`",
        )
    if not looped:
        yield ok(f"{len(cables)} cables join bridges, without a loop")
