"""A deployment that runs on a ShardGroup, as a test sees it: epochs, ranks in the process table, clients."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from schemas.deployment import ModelDeploymentStatus
from schemas.meta import ConditionStatus, find_condition, is_true
from schemas.replica import RankStatus, Replica
from store import codec, keys
from store.etcd.connect import connect
from store.port import Transport
from tests.support.fleet import Fleet
from tests.support.waiting import until, until_async

# To look through the process table takes some 30 ms, and what is waited for takes seconds.
_LOOK_S = 0.3
# Nothing is measured by these: on a machine of its own all takes a few seconds.
_FORMED_S = 150.0
_ANSWERED_S = 120.0
_ENGINE = ("engine", "engine.golden")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A process below a fleet's folder that an agent started for a replica."""

    pid: int
    node: str
    replica: str
    epoch: int
    """0 of a single process, and of one that makes a reference."""
    rank: int


def ranks_of(fleet: Fleet) -> list[Rank]:
    """Return every engine of the fleet in the process table, whatever its agent knows of it."""
    ranks = []
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if not {*_ENGINE} & {*argv[:4]} or process.status() == psutil.STATUS_ZOMBIE:
                continue
            folder = Path(process.cwd())
        except psutil.Error:
            continue
        if fleet.root.resolve() in folder.resolve().parents:
            epoch, rank = _number(argv, "epoch"), _number(argv, "rank")
            node = folder.parent.parent.name
            ranks.append(
                Rank(pid=process.pid, node=node, replica=folder.name, epoch=epoch, rank=rank)
            )
    return ranks


def _number(argv: Sequence[str], name: str) -> int:
    return int(dict(word.partition("=")[::2] for word in argv).get(name, "0"))


async def nothing_runs(fleet: Fleet) -> None:
    """See that no engine of the fleet is left in the process table.

    A rank whose last epoch was begun before its peer's Mac was known to be lost waits 120 s for that one.
    """
    await until(
        lambda: not ranks_of(fleet), limit_s=180, what="the end of all engines", every_s=_LOOK_S
    )


@dataclass(slots=True)
class Heard:
    """The answer that one client got: a text, and an error if it broke off."""

    text: str = ""
    chunks: int = 0
    error: str = ""
    finish: str = ""

    def has_begun(self) -> bool:
        return self.chunks > 2


async def listen(client: openai.AsyncOpenAI, fields: dict[str, Any], into: Heard) -> None:
    """Stream one chat; an error that the client can show to a person is noted, anything else is raised.

    Raises:
        TimeoutError: it hung.

    """
    try:
        async with asyncio.timeout(_ANSWERED_S):
            async for chunk in await client.chat.completions.create(**fields, stream=True):
                into.chunks += 1
                for choice in chunk.choices:
                    into.text += choice.delta.content or ""
                    into.finish = choice.finish_reason or into.finish
    except openai.APIError as error:
        into.error = error.message


async def ask(fleet: Fleet, fields: Sequence[dict[str, Any]]) -> list[str]:
    """Stream all these chats at once; return the texts, each of a whole answer."""
    heard = [Heard() for _ in fields]
    async with asking(fleet) as client, asyncio.TaskGroup() as tasks:
        for asked, one in zip(fields, heard, strict=True):
            tasks.create_task(listen(client, asked, one))
    assert {(one.error, one.finish) for one in heard} == {("", "length")}, heard
    return [one.text for one in heard]


@asynccontextmanager
async def asking(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield the official client of the fleet's gateway; it tries nothing twice."""
    url = f"{fleet.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


class Group:
    """One deployment on a group, and what the store says of its only replica."""

    def __init__(self, fleet: Fleet, transport: Transport, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self._transport = transport

    async def replica(self) -> Replica | None:
        """Return the deployment's replica; None while there is none, or two."""
        items = (await self._transport.list(keys.spec_prefix("Replica"))).items
        replicas = [codec.decode(Replica, item) for item in items]
        mine = [one for one in replicas if one.spec.deployment == self.name]
        return mine[0] if len(mine) == 1 else None

    async def epoch(self) -> int:
        """Return the epoch that is wanted now; 0 if there is none."""
        replica = await self.replica()
        formation = replica.spec.formation if replica is not None else None
        return formation.epoch if formation is not None else 0

    async def reports(self) -> list[RankStatus]:
        """Return what agents say of the replica's ranks."""
        replica, items = await self.replica(), (await self._transport.list(keys.RANK_PREFIX)).items
        said = [codec.decode(RankStatus, item) for item in items]
        return [status for status in said if replica and status.replica_uid == replica.metadata.uid]

    async def nothing_said(self) -> None:
        """See that the store has no replica, report or endpoint, of this deployment or another."""

        async def look() -> bool:
            prefixes = (keys.spec_prefix("Replica"), keys.RANK_PREFIX, keys.ENDPOINT_PREFIX)
            return not any([(await self._transport.list(prefix)).items for prefix in prefixes])

        await until_async(look, limit_s=60, what="the end of all reports", every_s=_LOOK_S)

    async def noticed(self, epoch: int) -> str:
        """Wait until an agent gives the epoch up, or the reconciler does; return why."""

        async def look() -> str:
            for report in await self.reports():
                if report.epoch == epoch and is_true(report.conditions, "EpochOver"):
                    said = find_condition(report.conditions, "EpochOver")
                    assert said is not None
                    return f"{said.reason} on {report.node}"
            replica = await self.replica()
            if replica is None or replica.spec.formation is None:
                return "the replica is gone"
            formation = replica.spec.formation
            return formation.because if formation.epoch > epoch else ""

        return await until_async(look, limit_s=_FORMED_S, what=f"the end of epoch {epoch}")

    async def serving(self, *, after: int = 0) -> Replica:
        """Wait until a later epoch serves and the gateway knows; no process of an earlier one is left then."""

        async def look() -> Replica | None:
            replica = await self.replica()
            if replica is None or replica.spec.formation is None:
                return None
            epoch, node = replica.spec.formation.epoch, replica.spec.ranks[0].node
            key = keys.endpoint_key(node, replica.name)
            if epoch <= after or await self._transport.get(key) is None:
                return None
            said = [report for report in await self.reports() if report.epoch == epoch]
            is_ready = [is_true(status.conditions, "Ready") for status in said]
            return replica if is_ready == [True] * len(replica.spec.ranks) else None

        try:
            found = await until_async(
                look, limit_s=_FORMED_S, what=f"an epoch after {after}", every_s=_LOOK_S
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self.told()}\n{self.fleet.words()}") from error
        await self.fleet.routed(self.name, 1)
        assert found.spec.formation is not None
        await self.only(found.spec.formation.epoch, len(found.spec.ranks))
        return found

    async def only(self, epoch: int, size: int) -> None:
        """See that the ranks of this epoch run, and none of another."""

        def look() -> bool:
            mine = [rank.epoch for rank in ranks_of(self.fleet) if self._is_mine(rank)]
            return mine == [epoch] * size

        what = f"{size} ranks of epoch {epoch} and no other"
        await until(look, limit_s=30, what=what, every_s=_LOOK_S)

    async def told(self) -> str:
        """Return what a person is told about the deployment."""
        done = await self.fleet.ctl("describe", "modeldeployment", self.name)
        return done.out + done.err

    async def unavailable(self, reason: str) -> str:
        """Wait until the deployment is not Available for this reason; return what people are told."""

        async def look() -> bool:
            item = await self._transport.get(keys.status_key("ModelDeployment", self.name))
            conditions = (
                codec.decode(ModelDeploymentStatus, item).conditions if item is not None else ()
            )
            said = find_condition(conditions, "Available")
            return (
                said is not None and said.status is ConditionStatus.FALSE and said.reason == reason
            )

        try:
            await until_async(look, limit_s=_FORMED_S, what=reason, every_s=_LOOK_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self.told()}\n{self.fleet.words()}") from error
        return await self.told()

    def rank(self, number: int) -> Rank:
        """Return the only process that runs as this rank."""
        (found,) = (
            one
            for one in ranks_of(self.fleet)
            if self._is_mine(one) and one.rank == number and one.epoch
        )
        return found

    def _is_mine(self, rank: Rank) -> bool:
        return rank.replica.rpartition("-")[0] == self.name


@asynccontextmanager
async def group_of(fleet: Fleet, name: str) -> AsyncIterator[Group]:
    """Yield the deployment of that name."""
    transport = connect(fleet.etcd.address)
    try:
        yield Group(fleet, transport, name)
    finally:
        await transport.close()
