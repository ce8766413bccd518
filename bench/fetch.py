"""The cost of a fetch: how late renewals of leases are while one agent gets models from another, and the gateway's p99.

Both agents share one core, and gateway, engine and load another, so the figures show what processes do to each other
through etcd and the kernel, and not a lack of cores. The last line is JSON.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tabulate import tabulate

from bench.gateway import loading, ours
from bench.gateway.loading import Load
from bench.gateway.parts import Engine, Programs, compiled, free_port, tree
from bench.result import finish, sized
from identity.names import Role
from schemas.deployment import HubReference
from tests.support.hub import COMMIT, StandInHub
from tests.support.identities import TestAuthority
from tests.support.sharing_fleet import SharingMac, start_mac
from tests.support.sharing_mac import Settings
from tests.support.waiting import until

_ROUNDS = sized(6, smoke=1)
_BYTES = sized(400, smoke=40) << 20
_BURST_S = sized(2.0, smoke=0.2)
_CHUNK = 1 << 20
MOST_LATE_S, MOST_P99 = 0.5, 1.05


@dataclass
class Bursts:
    """The gateway's p99 in microseconds, alone and beside a fetch, and the bytes a second of the fetches."""

    alone_us: list[float] = field(default_factory=list)
    beside_us: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def weights(seed: int) -> bytes:
    """Return bytes that no other seed has."""
    block = random.Random(seed).randbytes(_CHUNK - 4)
    return b"".join(number.to_bytes(4, "big") + block for number in range(_BYTES // _CHUNK))


def repositories() -> dict[str, dict[str, bytes]]:
    """Return a model for each round."""
    return {
        f"bench/model-{number}": {"config.json": b"{}", "model.safetensors": weights(number)}
        for number in range(_ROUNDS)
    }


def pin(pid: int, core: int) -> None:
    """Keep a process and what it started on one core, where the system can."""
    if sys.platform == "linux":  # macOS does not pin processes
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > core:
            for process in tree(pid):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {cores[core]})


async def p99_us(programs: Programs, port: int) -> float:
    """Return the p99 of one client's requests during a burst."""
    load = Load(port=port, connections=1, is_streamed=False, seconds=_BURST_S, key=ours.KEY)
    records = await loading.run(programs, load)
    return float(np.percentile(records["whole_s"], 99)) * 1e6


async def pull(mac: SharingMac, source: HubReference) -> float:
    """Let a Mac fetch a model; return the seconds that it took."""
    began_s = time.monotonic()
    mac.pull(source)
    await until(lambda: mac.has(source.folder), limit_s=300, what=f"a model on {mac.name}")
    return time.monotonic() - began_s


async def start(
    stack: AsyncExitStack, group: asyncio.TaskGroup, root: Path, etcd: Path
) -> tuple[SharingMac, SharingMac]:
    """Start the two agents."""
    authority = TestAuthority(root / "ids")
    macs = []
    for name in ("giver", "taker"):
        settings = Settings(
            name=name,
            root=str(root / name),
            identity=str(authority.issue(Role.NODE, name).path),
            address="127.0.0.1",
            port=free_port(),
            etcd=str(etcd),
        )
        mac = await start_mac(settings, root)
        stack.callback(mac.kill)
        group.create_task(mac.follow())
        macs.append(mac)
    await until(lambda: all(mac.is_ready for mac in macs), what="both agents")
    for mac in macs:
        pin(mac.child.pid, 0)
    return macs[0], macs[1]


async def measure(programs: Programs, port: int, taker: SharingMac, hub: StandInHub) -> Bursts:
    """Load the gateway in turns alone and beside a fetch."""
    found = Bursts()
    await p99_us(programs, port)
    for repo in hub.repos:
        found.alone_us.append(await p99_us(programs, port))
        source = HubReference(repo=repo, revision=COMMIT, endpoint=hub.endpoint)
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(pull(taker, source))
            await until(lambda: taker.pulls.get(source.folder), what="the fetch")
            found.beside_us.append(await p99_us(programs, port))
        found.rates.append(_BYTES / fetching.result())
    return found


async def main() -> None:
    """Measure and print."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-bench-")))
        programs = compiled(folder)
        engine = Engine(programs, "bench-0", free_port())
        engine.start()
        stack.callback(engine.end)
        gateway = await ours.start(stack, folder / "gateway", {"bench": [engine]})
        pin(gateway.pid, 1)
        hub = await stack.enter_async_context(StandInHub(repos=repositories()).serve())
        async with asyncio.TaskGroup() as group, AsyncExitStack() as macs:
            socket = gateway.etcd.address.socket
            assert socket is not None
            giver, taker = await start(macs, group, folder, socket)
            for repo in hub.repos:
                source = HubReference(repo=repo, revision=COMMIT, endpoint=hub.endpoint)
                await pull(giver, source)
            sent = hub.body_bytes
            found = await measure(programs, gateway.port, taker, hub)
            from_hub = (hub.body_bytes - sent) / (_BYTES * _ROUNDS)
    show(found, giver, taker, from_hub)


def show(found: Bursts, giver: SharingMac, taker: SharingMac, from_hub: float) -> None:
    """Print a table and the last line."""
    alone, beside = statistics.median(found.alone_us), statistics.median(found.beside_us)
    rate = statistics.median(found.rates) / 1e6
    rows = [
        ("bytes from the other Mac, MB/s", round(rate), ""),
        ("latest renewal of the giver, s", round(giver.late_s, 3), f"<= {MOST_LATE_S}"),
        ("latest renewal of the taker, s", round(taker.late_s, 3), f"<= {MOST_LATE_S}"),
        ("leases lost", giver.losses + taker.losses, 0),
        ("p99 of the gateway alone, us", round(alone), ""),
        ("beside a fetch, ratio", round(beside / alone, 3), f"<= {MOST_P99}"),
        ("bytes that the hub sent again, ratio", round(from_hub, 4), ""),
    ]
    print(tabulate(rows, headers=("", "measured", "aim")))
    finish(
        "fetch",
        {
            "latest_renewal_s": round(max(giver.late_s, taker.late_s), 4),
            "gateway_p99_ratio": round(beside / alone, 4),
        },
        {"megabytes_per_s": round(rate, 1), "renewals": giver.renewals + taker.renewals},
    )


if __name__ == "__main__":
    asyncio.run(main())
