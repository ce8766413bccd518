"""The node's part in tests of the cables: its rank as a child process, its results in the store, and its condition.

A test exists as long as the command that requested it. When it is gone, its rank is stopped and its results are
removed. The results are written under the agent's lease, so they do not outlive the agent.
"""

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from machinery.backoff import Backoff, Retries
from machinery.clock import Clock
from nodeagent.fabric import rank_process
from nodeagent.fabric.rank_process import RankMessage, SumRound
from nodeagent.node.registration import NodeRegistration
from schemas import fabric_verdict
from schemas.fabric_verdict import FabricVerdict
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
_BACKOFF = Backoff(first_s=0.3, limit_s=3.0)


class FabricTestRank:
    """The node's rank in one test."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        registration: NodeRegistration,
        test: FabricTest,
        rank: int,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._registration = registration
        self._test = test
        seat = test.spec.seats[rank]
        self._key = keys.fabric_rank_key(seat.node, test.name)
        self._result = FabricRank(
            test_uid=test.metadata.uid, rank=rank, node=seat.node, state="Running"
        )
        self._changed_result = asyncio.Event()

    async def refuse(self, why: str) -> None:
        """Publish that this node does not take part, until the test is gone."""
        self._set_result(self._result.model_copy(update={"state": "Failed", "message": why}))
        await self._publish()

    async def run(self, folder: Path, on_verdict: Callable[[FabricVerdict | None], None]) -> None:
        """Run the rank and publish its results until the test is gone, when this call is cancelled.

        `on_verdict` gets the verdict over this node's cables; None if the rank did not finish.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish())
            self._set_result(self._result)
            why = await self._run(folder)
            found = self._result.figures
            state = "Failed" if why else "Done"
            self._set_result(self._result.model_copy(update={"state": state, "message": why}))
            rows = [fabric_verdict.summarize_rank(figures) for figures in found]
            backend = self._test.spec.formation.backend
            on_verdict(None if why else fabric_verdict.judge(rows, backend))

    async def _run(self, folder: Path) -> str:
        """Run the rank to its end; return the error, "" if there is none."""
        spec, rounds = self._test.spec, list[SumRound]()

        def on_message(message: RankMessage) -> None:
            if not isinstance(message, SumRound):
                return
            rounds.append(message)
            if sum(sum_round.size == message.size for sum_round in rounds) == spec.rounds:
                done = rank_process.figures_by_size(rounds)
                self._set_result(self._result.model_copy(update={"figures": done}))

        try:
            found = rendezvous(self._test.metadata.uid, spec.formation, spec.seats)
            order = rank_process.write_order(folder, spec, self._result.rank, found)
            why = await rank_process.run_rank(order, on_message)
        except (OSError, ValueError) as error:
            return f"its process could not be started: {error}"
        if not why:
            # A wrong warm-up round counts, in addition to the requested rounds.
            self._set_result(
                self._result.model_copy(update={"figures": rank_process.figures_by_size(rounds)})
            )
        return why

    def _set_result(self, result: FabricRank) -> None:
        self._result = result
        self._changed_result.set()

    async def _publish(self) -> None:
        """Write the result under the lease whenever it changes, forever; delete it at the end."""
        retries = Retries(_BACKOFF, self._clock)
        try:
            while True:
                self._changed_result.clear()
                if await self._write():
                    retries.reset()
                else:
                    await retries.wait()
                    self._changed_result.set()
                await self._changed_result.wait()
        finally:
            with contextlib.suppress(StoreError):
                await self._transport.commit([], [Delete(key=self._key)])

    async def _write(self) -> bool:
        """Return whether the result is written."""
        lease = self._registration.lease
        if lease is None:
            return False
        try:
            await self._transport.commit(
                [], [Put(key=self._key, value=codec.encode(self._result), lease=lease)]
            )
        except StoreError as error:
            log.info("fabric test result not written; will retry", extra={"why": str(error)})
            return False
        return True


class NodeFabricTests:
    """The fabric tests in which this node takes part, one at a time."""

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

    async def run(self, registration: NodeRegistration, on_change: Callable[[], None]) -> None:
        """Take part forever; `on_change` is called when the condition may have changed."""
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
                    # It deletes its result; the next test of the group writes under the same key.
                    await asyncio.wait([ended])
                for uid in ours.keys() - running.keys():
                    running[uid] = group.create_task(
                        self._participate(ours[uid], registration, on_change)
                    )
                await self._changed.wait()

    async def fill(self, status: NodeStatus, registration: NodeRegistration) -> NodeStatus:
        """Return the status with the condition of the last test, which may be of an earlier run of this agent.

        Raises:
            StoreError: the earlier status could not be read.

        """
        if not self._is_resumed:
            described = await registration.described()
            before = (
                find_condition(described.conditions, FABRIC_HEALTHY)
                if described is not None
                else None
            )
            self._condition = self._condition or before
            self._is_resumed = True
        if self._condition is None:
            return status
        conditions = with_condition(status.conditions, self._condition)
        return status.model_copy(update={"conditions": conditions})

    def _sweep(self) -> None:
        """Delete the folders that an earlier run of this agent left behind."""
        expected = {self._test_folder(test).name for test in self._tests.items.values()}
        for folder in self._folder.glob("*"):
            if folder.name not in expected:
                shutil.rmtree(folder, ignore_errors=True)

    def _test_folder(self, test: FabricTest) -> Path:
        # A digest: the folder is deleted later, and a uid could hold a path.
        digest = hashlib.sha256(test.metadata.uid.encode()).hexdigest()
        return self._folder / digest[:16]

    def _rank(self, test: FabricTest) -> int | None:
        nodes = [seat.node for seat in test.spec.seats]
        return nodes.index(self._node) if self._node in nodes else None

    async def _participate(
        self, test: FabricTest, registration: NodeRegistration, on_change: Callable[[], None]
    ) -> None:
        rank = self._rank(test)
        assert rank is not None
        part = FabricTestRank(self._transport, self._clock, registration, test, rank)
        folder = self._test_folder(test)
        try:
            if self._busy:
                await part.refuse(f"it already takes part in a test of {self._busy}")
            elif folder.exists():
                # The other ranks are connected to a rank that ended with the earlier agent.
                await part.refuse("its agent was restarted during the test")
            else:
                await self._measure(part, folder, test, on_change)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _measure(
        self, part: FabricTestRank, folder: Path, test: FabricTest, on_change: Callable[[], None]
    ) -> None:
        def on_verdict(verdict: FabricVerdict | None) -> None:
            self._busy = ""
            self._condition = self._new_condition(test.name, verdict)
            on_change()

        self._busy = test.name
        log.info("fabric test begins", extra={"group": test.name})
        try:
            await part.run(folder, on_verdict)
        finally:
            if self._busy == test.name:
                self._busy = ""

    def _new_condition(self, group: str, verdict: FabricVerdict | None) -> Condition:
        """Return the condition after a test; an aborted test may be the fault of another node."""
        new = Condition(
            type=FABRIC_HEALTHY,
            status=ConditionStatus.UNKNOWN,
            reason="TestBrokeOff",
            message=f"shardgroup/{group}: the test did not finish",
            last_transition_time=self._clock.now(),
        )
        if verdict is not None:
            truth = ConditionStatus.TRUE if verdict.is_healthy else ConditionStatus.FALSE
            message = f"shardgroup/{group}: {verdict.message}"
            update = {"status": truth, "reason": verdict.reason, "message": message}
            new = new.model_copy(update=update)
        before = () if self._condition is None else (self._condition,)
        return with_condition(before, new)[0]
