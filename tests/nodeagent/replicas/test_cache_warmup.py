"""The warm-up of a new engine's prefix cache: whose prompts it reads, how many, and what cannot stop it."""

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from machinery import processes
from machinery.clock import SystemClock
from nodeagent.engines.engine_http import EngineHttp
from nodeagent.engines.engine_processes import EngineProcess
from nodeagent.peers.peer_blobs import PeerError
from nodeagent.replicas.cache_warmup import CacheWarmup
from nodeagent.replicas.deployment_replicas import StoredSiblings
from schemas.replica import Replica
from schemas.wire.recent_prompts import MAX_PROMPT_TOKENS, MAX_TOKENS, RecentPrompt, RecentPrompts
from store import codec
from store.memory import MemoryTransport
from tests.support.nodeagent_engine import FakeEngine
from tests.support.nodeagent_plans import NOW, wanted
from tests.support.values import present

KEY = "a" * 32
NODES = ("a", "b", "c", "d")


def on(node: str, *, deployment: str = "qwen", is_deleting: bool = False) -> Replica:
    replica = wanted()
    ranks = (replica.spec.ranks[0].model_copy(update={"node": node}),)
    spec = replica.spec.model_copy(update={"ranks": ranks, "deployment": deployment})
    deleted = NOW if is_deleting else None
    metadata = replica.metadata.model_copy(
        update={"name": f"{deployment}-{node}", "deletion_timestamp": deleted}
    )
    return replica.model_copy(update={"metadata": metadata, "spec": spec})


def prompts(*starts: int, salt: str = "", count: int = 3) -> tuple[RecentPrompt, ...]:
    return tuple(
        RecentPrompt(salt=salt, tokens=tuple(range(start, start + count))) for start in starts
    )


@dataclass(slots=True)
class Peers:
    """Other nodes, at an address each; a node without prompts does not answer."""

    answers: dict[str, tuple[RecentPrompt, ...]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def urls(self) -> dict[str, str]:
        return {node: f"https://{node}:1" for node in NODES[1:]}

    async def read(self, node: str, url: str, replica: str) -> RecentPrompts:
        assert url == f"https://{node}:1"
        self.asked.append(replica)
        if node not in self.answers:
            raise PeerError("it is off")
        return RecentPrompts(prompts=self.answers[node])


@pytest.fixture
def process(port: FakeEngine, tmp_path: Path) -> EngineProcess:
    child = present(processes.find_running(os.getpid()))
    return EngineProcess(
        replica="qwen-a",
        replica_uid="u1",
        served_name="qwen",
        address=port.address,
        child=child,
        log=tmp_path / "log",
    )


async def warmed(
    peers: Peers, process: EngineProcess, *replicas: Replica, limit_s: float = 20
) -> int:
    store = MemoryTransport(SystemClock())
    await store.commit([], [codec.put_spec(replica) for replica in (on("a"), *replicas)])
    http = EngineHttp()
    warmup = CacheWarmup(
        node="a",
        siblings=StoredSiblings(store),
        addresses=peers,
        peers=peers,
        engines=http,
        limit_s=limit_s,
    )
    try:
        return await warmup.warm(process)
    finally:
        await http.close()


async def test_a_new_engine_reads_the_newest_prompts_of_all_replicas_in_turn(
    port: FakeEngine, process: EngineProcess
) -> None:
    peers = Peers({"b": prompts(10, 20), "c": prompts(30, 20, salt=f"{KEY}:x")})
    assert await warmed(peers, process, on("b"), on("c"), on("d", deployment="qwen-big")) == 4
    read = [(salt, body["prompt"][0], body.get("cache_salt")) for salt, body in port.completed]
    assert read == [("", 10, None), (KEY, 30, "x"), ("", 20, None), (KEY, 20, "x")]
    assert {body["max_tokens"] for _, body in port.completed} == {1}
    assert sorted(peers.asked) == ["qwen-b", "qwen-c"]


async def test_replicas_that_are_about_to_end_are_asked_first(process: EngineProcess) -> None:
    peers = Peers()
    many = [on(f"n{at}") for at in range(6)]
    assert await warmed(peers, process, *many, on("d", is_deleting=True)) == 0
    assert peers.asked == ["qwen-d"]  # of those asked, only this one has an address


async def test_an_engine_reads_no_more_than_one_engine_keeps(
    port: FakeEngine, process: EngineProcess
) -> None:
    starts = range(6)
    peers = Peers({node: prompts(*starts, count=MAX_PROMPT_TOKENS, salt=node) for node in "bc"})
    most = MAX_TOKENS // MAX_PROMPT_TOKENS
    assert await warmed(peers, process, on("b"), on("c")) == most
    assert len(port.completed) == most


async def test_an_engine_that_takes_no_more_serves_with_what_it_has(
    port: FakeEngine, process: EngineProcess
) -> None:
    port.status = 503
    assert await warmed(Peers({"b": prompts(1, 2, 3)}), process, on("b")) == 0
    assert len(port.completed) == 1


async def test_a_slow_peer_holds_up_no_engine_beyond_the_limit(process: EngineProcess) -> None:
    @dataclass(slots=True)
    class Slow(Peers):
        @override
        async def read(self, node: str, url: str, replica: str) -> RecentPrompts:
            await asyncio.Event().wait()
            raise AssertionError

    assert await warmed(Slow(), process, on("b"), limit_s=0.1) == 0
