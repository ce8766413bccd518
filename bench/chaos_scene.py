"""A real fleet of `bench.chaos`: its declared deployment, its engines, and whether all of them serve."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from nodeagent.engines.engine_processes import EngineProcess, find_engines
from tests.support.fleet import Fleet
from tests.support.waiting import until_async

MODEL = "tiny"
_WHOLE_S = 120.0
_MANIFEST = """
apiVersion: fleet/v1alpha1
kind: ModelDeployment
metadata: {{name: tiny}}
spec:
  model: {{path: tiny}}
  replicas: {replicas}
  contextLength: {context}
  concurrency: 32
"""


@dataclass
class Scene:
    """A fleet that serves, and what is declared there."""

    fleet: Fleet
    nodes: int
    """One for each engine."""
    context: int = 512
    """Another one is another template."""
    drained: str = ""
    """The node that is drained."""
    hurt: Counter[str] = field(default_factory=Counter)
    """Number of times that each replica was the victim."""

    async def declare(self) -> None:
        """Apply the deployment as it is now."""
        await self.fleet.applied(_MANIFEST.format(replicas=self.nodes, context=self.context))

    def engines(self) -> list[tuple[str, EngineProcess]]:
        """Return all engine processes, each with its node."""
        names = [f"node-{number}" for number in range(1, self.nodes + 1)]
        return [
            (name, engine)
            for name in names
            for engine in find_engines(self.fleet.root / name / "engines")
        ]

    def victim(self) -> tuple[str, int]:
        """Return a node with an engine, and the engine's pid.

        Each in turn: who dies again and again is started later each time.
        """
        name, engine = min(self.engines(), key=lambda one: self.hurt[one[1].replica_uid])
        self.hurt[engine.replica_uid] += 1
        return name, engine.child.record.pid

    async def is_whole(self, without: int | None) -> bool:
        """Return whether there are as many engines as declared, all of them serve, and the gateway knows."""
        thread = await asyncio.to_thread(self.engines)
        pids = {engine.child.record.pid for _, engine in thread}
        if len(pids) != self.nodes or without in pids:
            return False
        async with aiohttp.ClientSession() as session:
            for _, engine in thread:
                if not await _says(session, f"{engine.address.http_url}/ready"):
                    return False
            health = await _says(session, f"{self.fleet.url}/health")
        return bool(health.get("models", {}).get(MODEL, {}).get("ready") == self.nodes)

    async def whole(self, without: int | None = None) -> None:
        """Wait until it is."""
        await until_async(
            lambda: self.is_whole(without), limit_s=_WHOLE_S, what=f"{self.nodes} engines"
        )

    async def ordered(self, *words: str) -> None:
        """Run fleetctl."""
        done = await self.fleet.ctl(*words, limit_s=_WHOLE_S)
        assert done.code == 0, done.err


async def _says(session: aiohttp.ClientSession, url: str) -> dict[str, dict[str, dict[str, int]]]:
    """Return the answer to a GET; empty if there is none, or it is a refusal."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return dict(await response.json()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return {}
