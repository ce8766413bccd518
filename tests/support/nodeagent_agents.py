"""Real agents as processes; the test acts as the reconciler."""

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from machinery import processes
from machinery.clock import SystemClock
from nodeagent.engines import engine_processes
from nodeagent.engines.engine_processes import EngineProcess, find_engines
from nodeagent.engines.health_client import HealthClient
from schemas.deployment import ModelSource
from schemas.meta import ObjectMeta, find_condition
from schemas.replica import Endpoint, MemoryProof, RankAssignment, RankStatus, Replica, ReplicaSpec
from schemas.wire.engine_address import EngineAddress
from store import codec, keys, objects
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Delete, Transport
from tests.support import forker
from tests.support.waiting import until_async

CLOCK = SystemClock()
NODE = "node-1"
HOST = "127.0.0.1"
# Enough for the tiny model: an engine keeps to the memory of its proof.
_PROOF = MemoryProof(weights_bytes=2**30, kv_cache_bytes=0, activation_bytes=0, overhead_bytes=0)


class AgentProcess:
    """`python -m nodeagent` with a state folder; `start()` starts it again."""

    def __init__(
        self,
        etcd: EmbeddedEtcd,
        state_dir: Path,
        models_dir: Path,
        name: str,
        *,
        port: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.state_dir = state_dir
        self.log = state_dir.with_suffix(".log")
        port = port or 20_000 + os.getpid() % 200 * 100
        self._words = [
            *("--etcd", f"unix:{etcd.address.socket}"),
            *("--state-dir", str(state_dir), "--models-dir", str(models_dir), "--name", name),
            *("--engine-port", str(port), "--memory", "4Gi", "--part-of-machine"),
            *("--api-port", "0"),
            *flags,
        ]
        self.child: processes.ChildProcess | None = None

    def start(self, *, tells_code: bool = False) -> processes.ChildProcess:
        """Start it; the exit code is known only with `tells_code`, which starts an interpreter of its own."""
        if tells_code:
            command = [sys.executable, "-m", "nodeagent", *self._words]
            self.child = processes.spawn(command, log=self.log)
        else:
            self.child = forker.start("nodeagent", self._words, log=self.log)
        return self.child

    def send(self, number: int) -> None:
        assert self.child is not None
        self.child.send(number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        assert self.child is not None
        assert await processes.wait_ended(self.child, CLOCK, limit_s=30)

    async def end(self) -> None:
        """End the agent and its engines."""
        if self.child is not None:
            self.send(signal.SIGCONT)
            await self.kill()
        for engine in self.engines():
            engine_processes.kill(engine)
            await processes.wait_ended(engine.child, CLOCK, limit_s=30)

    def engines(self) -> list[EngineProcess]:
        return find_engines(self.state_dir / "engines")

    async def engine(self) -> EngineProcess:
        """Wait until one engine runs, and return it."""

        async def one() -> EngineProcess | None:
            found = self.engines()
            assert len(found) < 2
            return found[0] if found else None

        return await until_async(one, limit_s=120, what="an engine runs")


class Desk:
    """Writes Replicas to the store, and reads the endpoints and reports of their agent."""

    def __init__(self, store: Transport) -> None:
        self.store = store

    async def assign(self, name: str, *, uid: str, path: str = "tiny", node: str = NODE) -> Replica:
        replica = Replica(
            metadata=ObjectMeta(name=name, uid=uid, generation=1),
            spec=ReplicaSpec(
                deployment=name.rpartition("-")[0],
                template="t",
                model=ModelSource(path=path),
                served_names=("tiny",),
                context_length=64,
                concurrency=1,
                ranks=(RankAssignment(node=node, memory=_PROOF),),
            ),
        )
        await self.store.commit([], [codec.put_spec(replica)])
        return replica

    async def mark_deleted(self, replica: Replica) -> None:
        mark = {"deletion_timestamp": datetime(2026, 1, 1, tzinfo=UTC)}
        metadata = replica.metadata.model_copy(update=mark)
        marked = replica.model_copy(update={"metadata": metadata})
        await self.store.commit([], [codec.put_spec(marked)])

    async def remove(self, name: str) -> None:
        gone = [keys.spec_key("Replica", name), keys.rank_key(NODE, name, 0)]
        await self.store.commit([], [Delete(key=key) for key in gone])

    async def endpoint(self, name: str) -> Endpoint | None:
        return await objects.get(self.store, Endpoint, name)

    async def lease_of(self, name: str) -> int | None:
        """Return the lease of the endpoint."""
        item = await self.store.get(keys.endpoint_key(NODE, name))
        return None if item is None else item.lease

    async def condition(self, name: str, type_: str = "Ready") -> tuple[str, str]:
        """Return status and reason of a condition of a rank; ("", "") if it is not reported."""
        item = await self.store.get(keys.rank_key(NODE, name, 0))
        if item is None:
            return "", ""
        found = find_condition(codec.decode(RankStatus, item).conditions, type_)
        return ("", "") if found is None else (found.status.value, found.reason)

    async def restarts(self, name: str) -> int:
        item = await self.store.get(keys.rank_key(NODE, name, 0))
        return 0 if item is None else codec.decode(RankStatus, item).restarts

    async def peak(self, name: str) -> int:
        """Return the reported peak memory of the replica in bytes."""
        item = await self.store.get(keys.rank_key(NODE, name, 0))
        return 0 if item is None else codec.decode(RankStatus, item).peak_bytes

    async def until(
        self, condition: Callable[[], Awaitable[object]], what: str, *, limit_s: float = 120
    ) -> None:
        async def holds() -> bool:
            return bool(await condition())

        await until_async(holds, limit_s=limit_s, what=what)

    async def until_published(self, name: str) -> Endpoint:
        return await until_async(
            lambda: self.endpoint(name), limit_s=120, what=f"{name} is published"
        )

    async def until_withdrawn(self, name: str) -> None:
        async def gone() -> bool:
            return await self.endpoint(name) is None

        await self.until(gone, f"{name} is withdrawn")

    async def until_condition(
        self, name: str, truth: str, reason: str, type_: str = "Ready"
    ) -> None:
        async def so() -> bool:
            return await self.condition(name, type_) == (truth, reason)

        await self.until(so, f"{name} is {type_}={truth} {reason}")


async def answers(url: str) -> bool:
    """Return whether the engine at the URL generates a token."""
    client = HealthClient()
    try:
        return await client.probe(EngineAddress.parse(url), "tiny") == ""
    finally:
        await client.close()
