"""Versions and hardware of all Macs side by side, with what differs from the rest of the fleet."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from identity.dialer import Dialer
from insight import process_client
from insight.errors import ProcessError
from insight.process_client import ProcessAddress, agent_address
from insight.tickets import issue_tickets
from schemas import quantity
from schemas.node import Node, NodeStatus
from store import objects
from store.errors import PermissionDeniedError
from store.port import Transport

UNKNOWN: Final = "-"
_ANSWER_S: Final = 3.0
_AT_ONCE: Final = 50
_MAX_NAMES: Final = 5

COLUMNS: Final = ("AGENT", "MLX", "MLX-LM", "PYTHON", "SYSTEM", "BUILD", "CHIP", "MEMORY")
_MAY_DIFFER: Final = frozenset({"CHIP", "MEMORY"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVersions:
    """The versions of one Mac, in the order of COLUMNS."""

    name: str
    values: tuple[str, ...]
    differs: frozenset[str] = field(default=frozenset())
    """The columns in which it differs from most Macs of its system."""

    def cells(self) -> list[str]:
        """Return the row of a table; a value that differs is marked by an asterisk."""
        marked = (
            f"{value} *" if title in self.differs else value
            for title, value in zip(COLUMNS, self.values, strict=True)
        )
        return [self.name, *marked]

    def tree(self) -> dict[str, object]:
        """Return the versions for -o json."""
        values = {
            title.lower(): None if value == UNKNOWN else value
            for title, value in zip(COLUMNS, self.values, strict=True)
        }
        return {
            "name": self.name,
            **values,
            "differs": sorted(title.lower() for title in self.differs),
        }


async def read_node_versions(transport: Transport, dialer: Dialer) -> list[NodeVersions]:
    """Return the versions that the nodes report, and the Python that each agent names itself. Raises StoreError."""
    nodes = [(n.name, n.status) for n in await objects.list_all(transport, Node) if n.status]
    addresses = [agent_address(dialer, name, status.agent_url) for name, status in nodes]
    pythons = await _ask_pythons(transport, [address for address in addresses if address.url])
    found = [_versions(name, status, pythons.get(name, UNKNOWN)) for name, status in nodes]
    return marked(found)


def _versions(name: str, status: NodeStatus, python: str) -> NodeVersions:
    values = (
        status.agent_version,
        status.mlx_version,
        status.mlx_lm_version,
        python,
        f"{status.os} {status.os_version}".strip(),
        status.fabric.os_build,
        status.chip,
        quantity.show(status.memory_bytes),
    )
    return NodeVersions(name=name, values=tuple(value or UNKNOWN for value in values))


def marked(found: Sequence[NodeVersions]) -> list[NodeVersions]:
    """Return the Macs with the columns in which each differs from the most frequent value. Pure.

    Of two values that are equally frequent, the first one counts; unknown values differ from nothing.
    """
    usual: dict[str, str] = {}
    for number, title in enumerate(COLUMNS):
        counts = Counter(
            versions.values[number] for versions in found if versions.values[number] != UNKNOWN
        )
        if counts and title not in _MAY_DIFFER:
            usual[title] = counts.most_common(1)[0][0]
    return [
        NodeVersions(
            name=versions.name,
            values=versions.values,
            differs=frozenset(
                title
                for title, value in zip(COLUMNS, versions.values, strict=True)
                if value not in (UNKNOWN, usual.get(title, value))
            ),
        )
        for versions in found
    ]


def difference_texts(found: Sequence[NodeVersions]) -> list[str]:
    """Return one sentence for each column in which Macs differ. Pure."""
    lines: list[str] = []
    for number, title in enumerate(COLUMNS):
        names = [
            f"{versions.name} has {versions.values[number]}"
            for versions in found
            if title in versions.differs
        ]
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            lines.append(f"{title} differs: {', '.join(names[:_MAX_NAMES])}{more}")
    return lines


async def _ask_pythons(transport: Transport, addresses: Sequence[ProcessAddress]) -> dict[str, str]:
    """Return the Python version of each agent that answers; one that does not is left out."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(address: ProcessAddress, bearer: str) -> str:
        async with slots:
            try:
                tree = await process_client.fetch_json(
                    address, "/health", bearer=bearer, limit_s=_ANSWER_S
                )
            except ProcessError:
                return UNKNOWN
        return str(tree.get("python") or UNKNOWN)[:20]

    async def ask_all(bearers: dict[str, str]) -> dict[str, str]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                process_address.label.removeprefix("node/"): group.create_task(
                    ask(process_address, bearers.get(process_address.key, ""))
                )
                for process_address in addresses
            }
        return {name: task.result() for name, task in tasks.items()}

    if not addresses:
        return {}
    try:
        async with issue_tickets(transport, [a.key for a in addresses]) as bearers:
            return await ask_all(dict(bearers))
    except PermissionDeniedError:  # a viewer: agents answer on their own machine, or to an identity
        return await ask_all({})
