"""Clusters of real etcd members on this machine: to be killed, frozen, cut off and brought back."""

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from machinery.clock import SystemClock
from machinery.processes import last_lines
from machinery.supervisor import Program, Supervisor
from store.etcd.address import EtcdAddress
from store.etcd.member.binary import locate
from tests.support import gateway
from tests.support.waiting import until, until_async

_READY_S = 30.0
_STARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a member: its hosts, and the prefix of its command line (a namespace, say)."""

    client_host: str = "127.0.0.1"
    peer_host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


LOOPBACK = (Place(), Place(), Place())


def quiet_port() -> int:
    """Return a free port below the ephemeral ones.

    A client that dials a dead member's ephemeral port again and again can connect to itself, and
    then the member cannot have its port back.
    """
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def killing_signal() -> signal.Signals:
    """Return how a member may be killed: etcds that lose data when they are killed are asked."""
    return signal.SIGTERM if locate(None).warning else signal.SIGKILL


class Member:
    """One member of a cluster."""

    def __init__(self, name: str, place: Place, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.prefix = place.prefix
        self.url = f"http://{place.client_host}:{quiet_port()}"
        self.peer_url = f"http://{place.peer_host}:{quiet_port()}"
        self.supervisor: Supervisor | None = None

    def plan(self, peers: Sequence["Member"], flags: Sequence[str]) -> None:
        """Say how it is to be started, beside these peers; itself is one of them."""
        command = (
            *self.prefix,
            str(locate(None).path),
            f"--name={self.name}",
            f"--data-dir={self.folder / self.name}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={','.join(f'{m.name}={m.peer_url}' for m in peers)}",
            f"--initial-cluster-token={self.folder.name}",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=warn",
            *flags,
        )
        program = Program(
            name=self.name,
            command=command,
            log=self.folder / f"{self.name}.log",
            record=self.folder / f"{self.name}.pid",
            grace_s=0.3,
        )
        self.supervisor = Supervisor(program, SystemClock())

    @property
    def process(self) -> Supervisor:
        assert self.supervisor is not None, "the member has no plan yet"
        return self.supervisor

    async def start(self) -> None:
        """Start it; it answers only when there is a quorum."""
        await self.process.start()

    async def kill(self) -> None:
        """Kill it as a power cut would, and wait until it is gone."""
        self._send(killing_signal())
        await until(lambda: not self.process.running, what=f"the end of {self.name}")

    def freeze(self) -> None:
        """Stop it: its connections stay open, and nothing is said."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        assert self.process.running, f"{self.name}: {last_lines(self.process.program.log)}"
        assert self.process.pid
        os.kill(self.process.pid, number)


class Cluster:
    """Members that know each other."""

    def __init__(self, folder: Path, places: Sequence[Place], flags: Sequence[str]) -> None:
        self.members = [Member(f"member{n}", place, folder) for n, place in enumerate(places)]
        for member in self.members:
            member.plan(self.members, flags)

    def address(self, first: int = 0) -> EtcdAddress:
        """Return the address of all members, this one first."""
        turned = [*self.members[first:], *self.members[:first]]
        return EtcdAddress(endpoints=tuple(member.url for member in turned))

    async def start(self) -> None:
        """Start all members and wait until each of them serves.

        Raises:
            AssertionError: they do not; with their last words.

        """
        for member in self.members:
            await member.start()
        await self.serves()

    async def serves(self, limit_s: float = _READY_S) -> None:
        """Wait until every member answers a linearizable read."""
        for member in self.members:
            try:
                await until_async(
                    partial(gateway.reads, member.url),
                    limit_s=limit_s,
                    what=f"an answer of {member.name}",
                )
            except AssertionError as error:
                words = last_lines(member.process.program.log)
                raise AssertionError(f"{error}; its last words: {words}") from error

    async def leader(self) -> Member:
        """Wait until a member leads and more than half of them say so; return it."""

        async def agreed() -> Member | None:
            seen = [await gateway.leader_of(member.url) for member in self.members]
            heard = [s for s in seen if s is not None and s.leader]
            for member, its in zip(self.members, seen, strict=True):
                if its is None or its.member != its.leader:
                    continue
                votes = [s for s in heard if s.leader == its.member and s.term == its.term]
                if 2 * len(votes) > len(self.members):
                    return member
            return None

        return await until_async(agreed, limit_s=_READY_S, what="a leader")

    async def followers(self) -> list[Member]:
        """Return who does not lead."""
        leader = await self.leader()
        return [member for member in self.members if member is not leader]

    async def stop(self) -> None:
        """End all members."""
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(member.process.stop())


@asynccontextmanager
async def running_cluster(
    folder: Path, *flags: str, places: Sequence[Place] = LOOPBACK
) -> AsyncIterator[Cluster]:
    """Run a cluster while the block runs; on other ports if somebody took one of ours first."""
    for attempt in range(1, _STARTS + 1):
        room = folder / f"cluster{attempt}"
        room.mkdir(parents=True)
        cluster = Cluster(room, places, flags)
        try:
            try:
                await cluster.start()
            except AssertionError:
                if attempt == _STARTS or all(m.process.running for m in cluster.members):
                    raise
                continue
            yield cluster
            return
        finally:
            await cluster.stop()
