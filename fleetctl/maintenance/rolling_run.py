"""Runs work on the Macs of a fleet over ssh: reads all of them first, then changes some at a time, stage after stage.

One failure policy: nothing is changed while a Mac cannot be read. Where a change fails, the Macs of the same batch finish,
nothing else begins, and the error names the Macs that failed and those that were not touched. The work on a Mac looks
first and does only what is missing, so the same command goes on where it stopped.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fleetctl.cli.errors import FleetctlError
from fleetctl.maintenance.mac_release import MacRelease, MacState
from fleetctl.maintenance.node_targets import NodeSessions

_CONCURRENCY: Final = 8

Work = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Work on some Macs, which ends before the next stage begins."""

    part: str
    """The service that it concerns."""
    nodes: tuple[str, ...]
    concurrency: int = _CONCURRENCY
    """The number of Macs that are changed at once."""


@dataclass(frozen=True, slots=True)
class PlanRefusal:
    """The reason why there is no plan, and the remedy."""

    message: str


async def for_each(
    nodes: Sequence[str], work: Work, *, concurrency: int = _CONCURRENCY
) -> list[str]:
    """Do the work for every node, some at once; return a line for each Mac that failed. Raises StoreError."""
    slots, failures = asyncio.Semaphore(concurrency), list[str]()

    async def attempt(node: str) -> None:
        async with slots:
            try:
                await work(node)
            except FleetctlError as error:
                failures.append(f"  node/{node}: {error.message}")

    try:
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(attempt(node))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return sorted(failures)


async def roll(stages: Sequence[Stage], work: Callable[[Stage, str], Awaitable[None]]) -> None:
    """Change the Macs of each stage in their order.

    Raises:
        FleetctlError: a change failed; no other Mac was touched after it.

    """
    batches = [
        (stage, stage.nodes[start : start + stage.concurrency])
        for stage in stages
        for start in range(0, len(stage.nodes), stage.concurrency)
    ]
    for number, (stage, nodes) in enumerate(batches, 1):

        async def change(node: str, stage: Stage = stage) -> None:
            await work(stage, node)

        if failures := await for_each(nodes, change, concurrency=stage.concurrency):
            rest = [f"{later.part} of {', '.join(names)}" for later, names in batches[number:]]
            raise FleetctlError(
                "\n".join(
                    [
                        f"{stage.part} failed on {len(failures)} of {len(nodes)} Macs, and nothing else was begun:",
                        *failures,
                        *([f"not touched: {'; '.join(rest)}"] if rest else []),
                        "Mend what these lines name, and run the same command again: it goes on where it stopped",
                    ]
                )
            )


@dataclass(frozen=True, slots=True)
class Mac:
    """One Mac with a session: its releases, and what runs there."""

    release: MacRelease
    state: MacState


async def open_macs(
    nodes: Sequence[str], sessions: NodeSessions, *, prefix: str, remedy: str
) -> dict[str, Mac]:
    """Log in to the Macs and return what runs there.

    Raises:
        FleetctlError: some cannot be read; `remedy` says what else the person can do.

    """
    macs: dict[str, Mac] = {}

    async def read(node: str) -> None:
        release = MacRelease(await sessions.open(node), prefix)
        macs[node] = Mac(release, await release.read())

    if failures := await for_each(nodes, read):
        raise FleetctlError(
            "\n".join(
                [
                    "nothing was changed, because these Macs cannot be reached:",
                    *failures,
                    f"Switch them on or correct --target, or {remedy}",
                ]
            )
        )
    return {node: macs[node] for node in nodes}
