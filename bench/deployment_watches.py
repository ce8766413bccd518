"""Cost of a changed deployment for a fleet's agents, which watch deployments and groups, or short records of them.

One real etcd with fsync; agents' caches with a connection each, in a process of their own; 100 deployments, of which one
is scaled, labelled or rolled out again and again, which concerns no Mac, and then names another model each time, which
concerns all. A leader keeps the records in every second round. `make bench-deployment-watches` takes a minute; its last
line is one JSON object, ratios first.
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench import agent_caches
from bench.agent_caches import AgentCaches, cpu_s, keeping_copies, running
from bench.result import arguments, finish, sized
from machinery.clock import SystemClock
from nodeagent.model_uses import ModelUses
from schemas.deployment import ModelDeployment, ModelDeploymentSpec, ModelSource
from schemas.meta import ObjectMeta
from store import codec
from store.etcd.address import EtcdAddress
from store.etcd.connect import connect
from store.etcd.member.binary import locate
from store.etcd.member.embedded import EmbeddedEtcd
from store.port import Transport

AGENTS = sized(100, smoke=4)
DEPLOYMENTS = sized(100, smoke=8)
CHANGES = sized(20, smoke=4)
ROUNDS = sized(3, smoke=1)
_MODULE = "bench.deployment_watches"
_CLOCK = SystemClock()


def deployment(number: int, change: int, *, model: str = "") -> ModelDeployment:
    """Return a deployment after so many changes."""
    name = f"model-{number:04}"
    return ModelDeployment(
        metadata=ObjectMeta(name=name, uid=name, labels={"team": "a", "change": str(change)}),
        spec=ModelDeploymentSpec(
            model=ModelSource(path=model or f"mlx-community/Model-{number}-4bit"),
            served_names=(f"{name}-chat",),
            replicas=1 + change,
        ),
    )


async def agents(address: EtcdAddress) -> None:
    """Run the caches of all agents; answer once all know the model that the first deployment names."""
    async with AsyncExitStack() as stack:
        caches: list[ModelUses] = []
        for _ in range(AGENTS):
            # All share one processor, which other work may need.
            transport = connect(address, idle_s=agent_caches.LIMIT_S)
            stack.push_async_callback(transport.close)
            caches.append(ModelUses(transport, _CLOCK))
        await agent_caches.serve(
            caches,
            lambda model, is_narrow: all(_knows(one, model, is_narrow=is_narrow) for one in caches),
        )


def _knows(cache: ModelUses, model: str, *, is_narrow: bool) -> bool:
    found = cache.items.get("model-0000")
    return cache.is_narrow is is_narrow and found is not None and model in found.models


async def sent_bytes(etcd: EmbeddedEtcd) -> float:
    """Return the bytes that etcd has sent to its clients, as it counts them."""
    reader, writer = await asyncio.open_unix_connection(etcd.address.socket)
    writer.write(b"GET /metrics HTTP/1.0\r\nhost: localhost\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    name = "etcd_network_client_grpc_sent_bytes_total "
    return next(
        float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name)
    )


class Bench:
    """The changes of one run, and what they cost."""

    def __init__(self, etcd: EmbeddedEtcd, transport: Transport) -> None:
        self._etcd = etcd
        self._transport = transport
        self._models = self._changes = 0

    async def change(self, *, names_a_model: bool) -> str:
        """Change the first deployment; return the model that it names then."""
        self._changes += 1
        self._models += names_a_model
        model = f"mlx-community/Another-{self._models}"
        changed = deployment(0, self._changes, model=model)
        await self._transport.commit([], [codec.put_spec(changed)])
        return model

    async def cost(
        self, crowd: AgentCaches, *, names_models: bool, is_narrow: bool
    ) -> dict[str, float]:
        """Return the bytes that etcd sends, and the milliseconds of CPU, for each change."""
        pid = self._etcd.supervisor.pid
        assert pid is not None
        start = await crowd.have(await self.change(names_a_model=True), is_narrow=is_narrow)
        sent, etcd_s = await sent_bytes(self._etcd), cpu_s(pid)
        for _ in range(CHANGES - 1):
            model = await self.change(names_a_model=names_models)
            if names_models:
                await crowd.have(model, is_narrow=is_narrow)
        # So that the agents have seen the others, too.
        end = await crowd.have(await self.change(names_a_model=True), is_narrow=is_narrow)
        return {
            "bytes": (await sent_bytes(self._etcd) - sent) / CHANGES,
            "etcd_ms": 1000 * (cpu_s(pid) - etcd_s) / CHANGES,
            "agents_ms": 1000 * (end - start) / CHANGES,
        }


async def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Return the medians of both ways and both kinds of change, measured in turns."""
    etcd = EmbeddedEtcd(locate(None), folder / "etcd", _CLOCK)
    await etcd.start()
    transport = connect(etcd.address)
    bench = Bench(etcd, transport)
    rounds: dict[str, list[dict[str, float]]] = {}
    try:
        for first in range(0, DEPLOYMENTS, 50):
            batch = range(first, min(first + 50, DEPLOYMENTS))
            await transport.commit([], [codec.put_spec(deployment(n, 0)) for n in batch])
        for _ in range(ROUNDS):
            for way in ("all", "records"):
                async with AsyncExitStack() as stack:
                    if way == "records":
                        await stack.enter_async_context(keeping_copies(transport))
                    crowd = await stack.enter_async_context(running(_MODULE, etcd))
                    for kind in ("scaled", "another_model"):
                        cost = await bench.cost(
                            crowd, names_models=kind == "another_model", is_narrow=way == "records"
                        )
                        rounds.setdefault(f"{kind}_{way}", []).append(cost)
    finally:
        await transport.close()
        await etcd.supervisor.stop()
    return agent_caches.medians(rounds)


def main() -> None:
    """Measure and print, or be the agents' process."""
    if words := arguments():
        asyncio.run(agents(EtcdAddress(socket=Path(words[-1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    ratios = {
        f"{kind}_{name}_of_all": round(
            found[f"{kind}_records"][name] / max(found[f"{kind}_all"][name], 0.001), 3
        )
        for kind in ("scaled", "another_model")
        for name in ("bytes", "etcd_ms", "agents_ms")
    }
    rounded = {way: {name: round(one, 3) for name, one in fs.items()} for way, fs in found.items()}
    finish("deployment-watches", ratios, {"agents": AGENTS, "changes": CHANGES, **rounded})


if __name__ == "__main__":
    main()
