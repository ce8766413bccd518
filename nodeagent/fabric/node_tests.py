"""The node's part in tests of the cables: a rank as a child process, and what came out as a condition.

A test is there for as long as the command that asked for it; when it is gone its rank is ended, and what was said of
it is removed. What we say lies under the agent's lease, so that nothing of it outlives us.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from machinery.clock import Clock
from nodeagent.fabric import measurements, rank_process
from nodeagent.fabric.measurements import FabricVerdict
from nodeagent.fabric.rank_process import RankMessage, SumRound
from nodeagent.node.registration import NodeRegistration
from schemas.fabrictest import FabricRank, FabricTest
from schemas.formation import rendezvous
from schemas.meta import Condition, ConditionStatus, find_condition, with_condition
from schemas.node import NodeStatus
from store import codec, keys
from store.errors import StoreError
from store.informer import Informer
from store.port import Delete, Put, Transport

log = logging.getLogger(__name__)

FABRIC_HEALTHY: Final = "FabricHealthy"
_RETRY_S = 0.3


class FabricTestRank:
    """The node's rank in one test."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        presence: NodeRegistration,
        test: FabricTest,
        rank: int,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._presence = presence
        self._test = test
        seat = test.spec.seats[rank]
        self._key = keys.fabric_rank_key(seat.node, test.name)
        self._said = FabricRank(
            test_uid=test.metadata.uid, rank=rank, node=seat.node, state="Running"
        )
        self._news = asyncio.Event()

    async def refuse(self, why: str) -> None:
        """Say that we do not take part, until the test is gone."""
        self._say(self._said.model_copy(update={"state": "Failed", "message": why}))
        await self._tell()

    async def take(self, folder: Path, judged: Callable[[FabricVerdict | None], None]) -> None:
        """Run the rank, tell how it goes, and keep what was said until the test is gone (this is cancelled then).

        `judged` hears what the sums say of this node's cables; None where the rank did not come to its end.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell())
            self._say(self._said)
            why = await self._run(folder)
            found = self._said.figures
            state = "Failed" if why else "Done"
            self._say(self._said.model_copy(update={"state": state, "message": why}))
            rows = [measurements.summarize_rank(one) for one in found]
            backend = self._test.spec.formation.backend
            judged(None if why else measurements.judge(rows, backend))

    async def _run(self, folder: Path) -> str:
        """Run the rank to its end; return what went wrong, or nothing."""
        spec, rounds = self._test.spec, list[SumRound]()

        def hear(word: RankMessage) -> None:
            if not isinstance(word, SumRound):
                return
            rounds.append(word)
            if sum(one.size == word.size for one in rounds) == spec.rounds:
                done = measurements.figures_by_size(rounds)
                self._say(self._said.model_copy(update={"figures": done}))

        try:
            found = rendezvous(self._test.metadata.uid, spec.formation, spec.seats)
            order = rank_process.write_order(folder, spec, self._said.rank, found)
            why = await rank_process.run_rank(order, hear)
        except (OSError, ValueError) as error:
            return f"its process could not be started: {error}"
        if not why:
            # A wrong warm-up is one more than the rounds that were asked for.
            self._say(
                self._said.model_copy(update={"figures": measurements.figures_by_size(rounds)})
            )
        return why

    def _say(self, said: FabricRank) -> None:
        self._said = said
        self._news.set()

    async def _tell(self) -> None:
        """Write what is said under our lease whenever it is news, for ever; in the end nothing of it stays."""
        try:
            while True:
                self._news.clear()
                if not await self._write():
                    await self._clock.sleep(_RETRY_S)
                    self._news.set()
                await self._news.wait()
        finally:
            with contextlib.suppress(StoreError):
                await self._transport.commit([], [Delete(key=self._key)])

    async def _write(self) -> bool:
        """Return whether it is written."""
        lease = self._presence.lease
        if lease is None:
            return False
        try:
            await self._transport.commit(
                [], [Put(key=self._key, value=codec.encode(self._said), lease=lease)]
            )
        except StoreError as error:
            log.info("test of the fabric not reported yet", extra={"why": str(error)})
            return False
        return True


class NodeFabricTests:
    """The tests that this node takes part in, one at a time."""

    def __init__(self, transport: Transport, clock: Clock, *, node: str, folder: Path) -> None:
        self._transport = transport
        self._clock = clock
        self._node = node
        self._folder = folder
        self._tests = Informer(
            transport,
            keys.FABRIC_TEST_PREFIX,
            lambda item: codec.decode_object(FabricTest, item),
            clock,
        )
        self._changed = asyncio.Event()
        self._busy = ""
        self._condition: Condition | None = None
        self._is_resumed = False

    async def run(self, presence: NodeRegistration, on_news: Callable[[], None]) -> None:
        """Take part for ever; `on_news` is called when the condition may be another one."""
        self._tests.on_change(lambda _: self._changed.set())
        running: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tests.run())
            await self._tests.wait_synced()
            self._sweep()
            while True:
                self._changed.clear()
                ours = {
                    test.metadata.uid: test
                    for test in self._tests.items.values()
                    if self._rank(test) is not None
                }
                for uid in running.keys() - ours.keys():
                    ended = running.pop(uid)
                    ended.cancel()
                    # It removes what it said, and the next test of the group says it under the same key.
                    await asyncio.wait([ended])
                for uid in ours.keys() - running.keys():
                    running[uid] = group.create_task(self._take(ours[uid], presence, on_news))
                await self._changed.wait()

    async def fill(self, status: NodeStatus, presence: NodeRegistration) -> NodeStatus:
        """Return the status with what the last test said, be it one of an earlier run of this agent.

        Raises:
            StoreError: what was said earlier could not be asked for.

        """
        if not self._is_resumed:
            said = await presence.described()
            before = find_condition(said.conditions, FABRIC_HEALTHY) if said is not None else None
            self._condition = self._condition or before
            self._is_resumed = True
        if self._condition is None:
            return status
        conditions = with_condition(status.conditions, self._condition)
        return status.model_copy(update={"conditions": conditions})

    def _sweep(self) -> None:
        """Remove what an earlier run of this agent left of tests that are gone."""
        there = {self._place(test).name for test in self._tests.items.values()}
        for folder in self._folder.glob("*"):
            if folder.name not in there:
                shutil.rmtree(folder, ignore_errors=True)

    def _place(self, test: FabricTest) -> Path:
        # A digest: what is removed later must not be wherever a uid points to.
        digest = hashlib.sha256(test.metadata.uid.encode()).hexdigest()
        return self._folder / digest[:16]

    def _rank(self, test: FabricTest) -> int | None:
        nodes = [seat.node for seat in test.spec.seats]
        return nodes.index(self._node) if self._node in nodes else None

    async def _take(
        self, test: FabricTest, presence: NodeRegistration, on_news: Callable[[], None]
    ) -> None:
        rank = self._rank(test)
        assert rank is not None
        part = FabricTestRank(self._transport, self._clock, presence, test, rank)
        folder = self._place(test)
        try:
            if self._busy:
                await part.refuse(f"it takes part in a test of {self._busy} already")
            elif folder.exists():
                # The other ranks are connected to a rank that died with that agent.
                await part.refuse("its agent was started again meanwhile")
            else:
                await self._measure(part, folder, test, on_news)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _measure(
        self, part: FabricTestRank, folder: Path, test: FabricTest, on_news: Callable[[], None]
    ) -> None:
        def judged(verdict: FabricVerdict | None) -> None:
            self._busy = ""
            self._condition = self._judged(test.name, verdict)
            on_news()

        self._busy = test.name
        log.info("test of the fabric begins", extra={"group": test.name})
        try:
            await part.take(folder, judged)
        finally:
            if self._busy == test.name:
                self._busy = ""

    def _judged(self, group: str, verdict: FabricVerdict | None) -> Condition:
        """Return what a test says of this node; one that broke off may be another's fault."""
        new = Condition(
            type=FABRIC_HEALTHY,
            status=ConditionStatus.UNKNOWN,
            reason="TestBrokeOff",
            message=f"shardgroup/{group}: the test did not come to its end",
            last_transition_time=self._clock.now(),
        )
        if verdict is not None:
            truth = ConditionStatus.TRUE if verdict.is_healthy else ConditionStatus.FALSE
            message = f"shardgroup/{group}: {verdict.message}"
            update = {"status": truth, "reason": verdict.reason, "message": message}
            new = new.model_copy(update=update)
        before = () if self._condition is None else (self._condition,)
        return with_condition(before, new)[0]
