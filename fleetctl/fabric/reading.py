"""Groups and nodes as the store has them, for the verbs of `fleetctl fabric`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetctl import groups, reader
from fleetctl.connect import opened
from fleetctl.errors import FleetctlError
from fleetctl.kinds import kind_of
from schemas.node import Node
from schemas.shardgroup import ShardGroup
from store.port import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is."""

    groups: tuple[ShardGroup, ...]
    nodes: tuple[Node, ...]
    ready: frozenset[str]
    """Nodes whose agents are alive."""


async def read(words: Sequence[str], options: dict[str, Any]) -> Seen:
    """Return the groups that the words name, or all, and every node.

    Raises:
        FleetctlError: there is no such group; with the nearest.

    """
    names = tuple(_name(word) for word in words)
    async with opened(options) as transport:
        found = await reader.read(transport, kind_of("shardgroups"), names)
        return Seen(
            groups=tuple(one for one in found if isinstance(one, ShardGroup)),
            nodes=tuple(await groups.read_nodes(transport)),
            ready=await reader.ready_nodes(transport),
        )


def _name(word: str) -> str:
    """Return the name in `studio` or `shardgroup/studio`."""
    kind, slash, name = word.partition("/")
    if not slash:
        return word
    if kind_of(kind).type is not ShardGroup:
        raise click.UsageError(f"{word} is no ShardGroup; write NAME or shardgroup/NAME")
    return name


async def one_group(transport: Transport, word: str | None) -> ShardGroup:
    """Return the group that the word names; the only one there is where it names none.

    Raises:
        FleetctlError: there is no such group, or there are several.

    """
    names = (_name(word),) if word is not None else ()
    found = await reader.read(transport, kind_of("shardgroups"), names)
    if len(found) != 1:
        known = ", ".join(group.name for group in found)
        raise FleetctlError(
            f"which group? There are {known}"
            if found
            else "there is no ShardGroup; declare one, or use --local"
        )
    (group,) = found
    assert isinstance(group, ShardGroup)
    return group
