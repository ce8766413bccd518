"""Runs one seed from start to end in virtual time, and reports errors with the script."""

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from machinery import virtual_time
from machinery.gc_pause import pause_collection
from tests.simulation import script
from tests.simulation.drama import Drama
from tests.simulation.fixed_point import faults
from tests.simulation.script import NODES, Happening
from tests.simulation.world import World

LENGTH = 8
"""Lines of a script."""
_CONVERGES_S = 300.0
"""Restarts back off for a minute, deletions and hung engines take another."""
_REST_S = 12.0
"""Longer than anything that looks again by itself."""


class Broken(AssertionError):  # noqa: N818 - it is what is asserted
    """A law was broken, or the fleet did not converge."""


def run(seed: int, *, length: int = LENGTH) -> str:
    """Run one seed; return a digest of all writes.

    Raises:
        Broken: with the script, to be read by people.

    """
    lines = script.write(seed, length)
    random.seed(seed)  # jitter of the code under test
    with _complaints() as complaints, pause_collection():
        wrong, digest = virtual_time.run(_live(seed, lines))
    wrong.extend(complaints)
    if wrong:
        told = "\n".join((*map(str, lines), "", *wrong[:20]))
        raise Broken(f"seed {seed} (`python -m tests.simulation {seed}`):\n{told}")
    return digest


async def _live(seed: int, lines: tuple[Happening, ...]) -> tuple[list[str], str]:
    async with asyncio.TaskGroup() as group:
        world = World(group, seed)
        for name in NODES:
            world.start_agent(name)
        # One that waits costs as much as one that leads, and some seeds are enough to see it take over.
        for _ in range(2 if seed % 4 == 0 else 1):
            world.start_controller()
        drama = Drama(world)
        await drama.play(lines)
        wrong = await _end(world, drama)
        wrong = [*world.store.broken, *wrong]
        digest = world.store.digest()
        world.stop()
    return wrong, digest


async def _end(world: World, drama: Drama) -> list[str]:
    """Stop all mishaps, let the fleet come to rest, and return the differences to the desired state."""
    await drama.mend()
    left = await _settled(world)
    if left:
        return ["it did not converge:", *left]
    await drama.last_words()
    left = await _settled(world)
    lacking = [name for name, n in (("qwen", 2), ("llama", 1)) if _replicas(world, name) != n]
    if left or lacking:
        return ["it did not converge in the end:", *left, *lacking]
    before = world.store.revision
    await world.clock.sleep(_REST_S)
    written = world.store.since(before)
    return [f"written though nothing changed: {key}" for key in written]


def _replicas(world: World, deployment: str) -> int:
    values = world.store.state.replicas.values()
    return sum(replica.spec.deployment == deployment for replica in values)


async def _settled(world: World) -> list[str]:
    """Wait until everything is as it should be, and nothing has been written for a while."""
    deadline = world.clock.monotonic() + _CONVERGES_S
    while True:
        before = world.store.revision
        await world.clock.sleep(2.0)
        if world.store.broken or (world.store.revision == before and not faults(world)):
            return []  # a broken law explains more than its consequences
        if world.clock.monotonic() > deadline:
            return faults(world) or ["it never came to rest", *world.store.since(before)]


class _Ear(logging.Handler):
    """Collects logged errors: defects that a loop survived."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._heard = heard
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(self.format(record))


@contextmanager
def _complaints() -> Iterator[list[str]]:
    heard: list[str] = []
    ear, root = _Ear(heard), logging.getLogger()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    root.addHandler(ear)
    try:
        yield heard
    finally:
        root.removeHandler(ear)
        logging.disable(before)
