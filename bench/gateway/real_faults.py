"""Faults of real engines in a real fleet under load: `make bench-gateway-faults-real`.

etcd, a reconciler, agents, a gateway and two, then three engines with a tiny model. Streams and whole answers are asked for
at once, each by as many connections as said, while one engine is killed, stopped, restarted or drained, or the deployment
gets a new template; then the same while etcd is dead for a while. All is greedy, and every text compared with what an
engine answered that nobody disturbed. The load lasts until all engines serve again. With `SECONDS` (environment) it lasts
at least as long, and each fault happens without etcd, too. The last line is JSON.
"""

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from tabulate import tabulate

from bench.gateway import loading, outcomes
from bench.gateway.loading import Load
from bench.gateway.outcomes import Circumstances, Outcome
from bench.gateway.parts import Programs, ask, compiled
from bench.gateway.real_acts import FAULTS, MODEL, Fault, Scene
from bench.result import finish, sized
from tests.support.commands import run_module
from tests.support.fleet import running_fleet

_BEFORE_S_EACH = 1 / 20
"""So many seconds for each connection before the fault, so that streams are under way by then."""
_AFTER_S = 1.0
_ETCD_AWAY_S = 8.0
_PROMPTS = 24
_GRACE_S = 10.0


@dataclass(frozen=True)
class Setting:
    """The engines and the clients of one run."""

    nodes: int
    connections: tuple[int, ...]
    is_without_etcd: bool = False
    """etcd dies with each fault, and comes back after a while."""
    faults: frozenset[str] = frozenset(fault.name for fault in FAULTS)

    @property
    def name(self) -> str:
        return f"{self.nodes} engines" + (", etcd away" if self.is_without_etcd else "")


BRIEF = (Setting(2, (4,), faults=frozenset({"none", "kill"})),)
SHORT = (
    Setting(2, (16,)),
    Setting(2, (16,), is_without_etcd=True, faults=frozenset({"kill", "stop", "roll"})),
    Setting(3, (64,)),
)
LONG = (
    Setting(2, (16,)),
    Setting(2, (16,), is_without_etcd=True),
    Setting(3, (64,)),
    Setting(3, (64,), is_without_etcd=True),
)
"""24 faults: half an hour with `SECONDS=60`."""


@dataclass(frozen=True)
class Bench:
    """A fleet that serves, and what is asked of it."""

    scene: Scene
    programs: Programs
    folder: Path
    seconds: float
    """For how long each fault has load at least."""

    def load(self, connections: int, *, is_streamed: bool) -> Load:
        return Load(
            port=self.scene.fleet.gateway_port,
            connections=connections,
            is_streamed=is_streamed,
            tokens=self.folder / ("streams" if is_streamed else "wholes"),
        )


def bodies() -> list[dict[str, Any]]:
    """Return what is asked: short and long answers, each for a prompt of its own."""
    return [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"We hold these truths, number {n}: " * 3}],
            "max_tokens": 24 + n * 4,
            "temperature": 0,
        }
        for n in range(_PROMPTS)
    ]


async def write_references(scene: Scene, folder: Path) -> None:
    """Ask an engine that nobody disturbs, one by one, and write down what it says."""
    lines: dict[str, list[bytes]] = {"wholes": [], "streams": []}
    _, engine = scene.engines()[0]
    async with aiohttp.ClientSession() as session:
        for body in bodies():
            url = f"{engine.address.http_url}/v1/chat/completions"
            async with session.post(url, json=body) as response:
                text = (await response.json())["choices"][0]["message"]["content"]
            for name, asked in (("wholes", body), ("streams", {**body, "stream": True})):
                lines[name] += [orjson.dumps(asked), orjson.dumps(text)[1:-1]]
    for name, found in lines.items():
        (folder / name).write_bytes(b"\n".join(found) + b"\n")


def counted(scene: Scene) -> tuple[int, int]:
    """Return how many streams went on elsewhere, and how many requests were asked again, so far."""
    text = ask(scene.fleet.gateway_port, "/metrics", 10.0).decode()
    resumed = re.findall(
        r'^fleet_gateway_resumptions_total\{outcome="resumed"\} (\S+)', text, re.MULTILINE
    )
    retried = re.findall(r"^fleet_gateway_retries_total\{.*\} (\S+)", text, re.MULTILINE)
    return int(sum(map(float, resumed))), int(sum(map(float, retried)))


@asynccontextmanager
async def without_etcd(scene: Scene) -> AsyncIterator[None]:
    """Stop etcd for a while, at least as long as the context."""
    await scene.fleet.kill_etcd()
    began_s = time.monotonic()
    try:
        yield
        await asyncio.sleep(began_s + _ETCD_AWAY_S - time.monotonic())
    finally:
        await scene.fleet.etcd.start()


async def suffered(scene: Scene, fault: Fault, *, is_without_etcd: bool) -> float:
    """Cause the fault; return the seconds until all is well again."""
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        if is_without_etcd and not fault.is_ordered:
            await stack.enter_async_context(without_etcd(scene))
        gone = await fault.begin(scene)
        if is_without_etcd and fault.is_ordered:
            await stack.enter_async_context(without_etcd(scene))
        await asyncio.sleep(fault.lasts_s)
    if fault.end is not None:
        await fault.end(scene)
    await scene.whole(gone)
    return time.monotonic() - began_s


async def under_load(bench: Bench, setting: Setting, connections: int, fault: Fault) -> Outcome:
    """Load the gateway with both kinds of requests until the fault is over."""
    before, began_s = counted(bench.scene), time.monotonic()
    async with AsyncExitStack() as stack:
        loads = [
            await stack.enter_async_context(
                loading.running(bench.programs, bench.load(connections, is_streamed=is_streamed))
            )
            for is_streamed in (False, True)
        ]
        await asyncio.sleep(connections * _BEFORE_S_EACH)
        again_s = await suffered(bench.scene, fault, is_without_etcd=setting.is_without_etcd)
        await asyncio.sleep(max(_AFTER_S, began_s + bench.seconds - time.monotonic()))
        wholes, streams = await asyncio.gather(*(load.ended() for load in loads))
    resumed, retried = counted(bench.scene)
    during = Circumstances(
        setting=setting.name,
        connections=connections,
        fault=fault.name,
        again_s=None if fault.name == "none" else round(again_s, 1),
        resumed=resumed - before[0],
        retried=retried - before[1],
    )
    return outcomes.told(during, wholes, streams)


async def measured(
    programs: Programs, folder: Path, setting: Setting, seconds: float
) -> list[Outcome]:
    """Return what each fault does to a fleet of its own."""
    own = folder / setting.name.replace(", ", "-").replace(" ", "-")
    own.mkdir()
    found: list[Outcome] = []
    async with running_fleet(
        own / "fleet", folder / "models", nodes=setting.nodes, grace_s=_GRACE_S
    ) as fleet:
        scene = Scene(fleet, setting.nodes)
        await scene.declare()
        await scene.whole()
        await write_references(scene, own)
        bench = Bench(scene, programs, own, seconds)
        for connections in setting.connections:
            for fault in (one for one in FAULTS if one.name in setting.faults):
                found.append(await under_load(bench, setting, connections, fault))
                print(outcomes.line(found[-1]), flush=True)
    return found


async def main() -> None:
    """Measure and print."""
    own = asyncio.current_task()
    assert own is not None
    # Else whoever ends the bench leaves its fleet behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
    began_s, seconds = time.monotonic(), float(os.environ.get("SECONDS", "0"))
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as name:
        folder = Path(name)
        programs = compiled(folder)
        await run_module("tests.support.tiny_model", str(folder / "models" / MODEL), "--endless")
        print(f"{os.cpu_count()} cores shared by load, engines and all else", flush=True)
        for setting in LONG if seconds else sized(SHORT, smoke=BRIEF):
            found += await measured(programs, folder, setting, seconds)
    totals = outcomes.summary(found)
    rows = [[name, *values.values()] for name, values in totals.items()]
    print(tabulate(rows, headers=["", *next(iter(totals.values()))]))
    took = {"seconds": round(time.monotonic() - began_s, 1)}
    finish("gateway_faults_real", outcomes.sums(found), {**totals, **took})


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
