"""The test of the fabric on one machine: ranks on its loopback, without a fleet."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from fleetctl.errors import FleetctlError
from fleetctl.fabric import bench_text
from fleetctl.fabric.bench_text import Result, Wanted
from machinery.clock import SystemClock
from nodeagent.fabric import child, figures, orders
from nodeagent.fabric.orders import Connected, Round, Word
from schemas.fabrictest import FabricRank, FabricTestSpec
from schemas.formation import Formation, Seat
from schemas.rendezvous import Rendezvous, rendezvous

_HOST = "127.0.0.1"
_WINDOWS_TRIED = 20


class _RankError(Exception):
    """A rank did not come to its end; the others cannot either."""


async def measure(size: int, wanted: Wanted, tell: Callable[[str], None]) -> Result:
    """Run the test with so many ranks.

    Raises:
        FleetctlError: a rank could not be started, or did not come to its end.

    """
    uid = secrets.token_hex(8)
    spec = FabricTestSpec(
        formation=Formation(group="local", formed_at=SystemClock().now()),
        seats=tuple(Seat(node=f"rank-{n}", addresses=(_HOST,)) for n in range(size)),
        sizes=wanted.sizes,
        rounds=wanted.rounds,
    )
    spec, found = _with_free_ports(uid, spec)
    heard: list[list[Word]] = [[] for _ in spec.seats]
    with TemporaryDirectory(prefix="fleet-fabric-") as folder:
        try:
            async with asyncio.TaskGroup() as group:
                for rank in range(size):
                    order = orders.place(Path(folder), spec, rank, found)
                    hear = _teller(heard[rank], spec, tell if rank == 0 else None)
                    group.create_task(_follow(order, hear))
        except* (_RankError, OSError) as failed:
            raise FleetctlError(f"the test broke off: {failed.exceptions[0]}") from failed
    ranks = tuple(
        FabricRank(
            test_uid=uid,
            rank=rank,
            node=spec.seats[rank].node,
            state="Done",
            figures=figures.figures(word for word in words if isinstance(word, Round)),
        )
        for rank, words in enumerate(heard)
    )
    return Result(about="this machine", backend="ring", ranks=ranks)


async def _follow(order: orders.Order, hear: Callable[[Word], None]) -> None:
    why = await child.follow(order, hear)
    if why:
        raise _RankError(f"rank {order.rank}: {why}")


def _teller(
    heard: list[Word], spec: FabricTestSpec, tell: Callable[[str], None] | None
) -> Callable[[Word], None]:
    """Return what keeps a rank's words, and tells of each size that is done."""

    def hear(word: Word) -> None:
        heard.append(word)
        if tell is None:
            return
        if isinstance(word, Connected):
            tell(f"{len(spec.seats)} ranks are connected")
        if isinstance(word, Round):
            done = sum(isinstance(one, Round) and one.size == word.size for one in heard)
            if done == spec.rounds:
                tell(f"{bench_text.size(word.size)} done")

    return hear


def _with_free_ports(uid: str, spec: FabricTestSpec) -> tuple[FabricTestSpec, Rendezvous]:
    """Return the first epoch whose ports nobody listens on; somebody may take one a moment later."""
    for epoch in range(1, _WINDOWS_TRIED + 1):
        formation = spec.formation.model_copy(update={"epoch": epoch})
        found = rendezvous(uid, formation, spec.seats)
        if all(_is_free(place) for places in found.hosts for place in places):
            return spec.model_copy(update={"formation": formation}), found
    raise FleetctlError(
        f"no free ports between {spec.formation.port} and {spec.formation.port + 8192}; what listens there?"
    )


def _is_free(place: str) -> bool:
    host, _, port = place.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return False
    return True
